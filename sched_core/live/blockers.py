"""The facts that keep a job from training, read from the core. ``why`` makes a sentence of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs import places
from gpuslice.sched_core.jobs.accounts import Activity
from gpuslice.sched_core.jobs.command import Stage
from gpuslice.sched_core.jobs.conditions import described, followed
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState

from .copies import Copies
from .wait_facts import Blocked, Facts, Lost, Memory, Quota, Refusal, Use
from .why import explain

_ENDING = (RankPhase.LEAVING, RankPhase.GONE)


class Blockers:
    """The reasons why jobs do not train, at one moment.

    Parameters
    ----------
    core
        The core of the jobs. It must not change while this object is used.
    now_s
        The moment, on the core's clock.
    copies
        The copies of states on other nodes, if they are known.
    progress
        Returns of a job whose state is being brought the bytes that have arrived, and of all.
    """

    def __init__(
        self,
        core: Core,
        now_s: float,
        copies: Copies | None = None,
        progress: Callable[[str], tuple[int, int] | None] = lambda job: None,
    ) -> None:
        self._copies = copies
        self._progress = progress
        self._core = core
        self._now_s = now_s

    def why(self, job: Gang) -> str | None:
        """Return why ``job`` does not train. None if it trains and all is well, or nothing is left of it."""
        found = self.explain(job)
        return None if found is None else found[1]

    def explain(self, job: Gang) -> tuple[str, str] | None:
        """Return the name of the case that applies (``why.explain``), and the sentence as of ``why``."""
        if job.state.ended and job.processes_gone:
            return None
        return explain(self.facts(job))

    def brought(self, job: Gang) -> tuple[int, int] | None:
        """Return the bytes of the state of ``job`` that have been brought, and of all. None: none comes."""
        if job.command.stage is not Stage.BRINGING:
            return None
        arrived, total = self._progress(job.id) or (0, 0)
        return arrived, max(total, job.relocation.state_bytes)

    def facts(self, job: Gang) -> Facts:
        """Return the facts about ``job`` that can keep it from training."""
        facts = self._of_processes(job) | self._of_devices(job)
        if not job.lease and not job.state.ended:
            facts |= self._of_waiting(job)
        return Facts(**facts)

    def _of_processes(self, job: Gang) -> dict[str, Any]:
        nodes = self._core.state.nodes
        absent = tuple(rank.number for rank in job.present(RankPhase.ABSENT))
        origin = nodes.origin(job) if job.command.stage is Stage.BRINGING else ()
        return {
            "id": job.id,
            "state": job.state,
            "held": job.held,
            "begin_unix_s": job.conditions.begin_unix_s,
            "begins_s": self._core.state.wall.moment(job.conditions.begin_unix_s) - self._now_s,
            "after": tuple(
                described(one, array=followed(one) not in self._core.jobs) for one in job.conditions.after
            ),
            "kept": job.keep is not None,
            "ranks": len(job.members),
            "for_s": self._now_s - self._since_s(job, bool(absent)),
            "trains": job.activity is Activity.TRAINS and job.processes.trains,
            "launched": job.command.launched,
            "exists": not job.processes_gone,
            "retry_s": job.not_before_s - self._now_s,
            "reason": job.verdict.reason,
            "absent": absent,
            "ending": job.command.launched and not absent and not job.training(),
            "idle": job.processes.idle_since_s is not None,
            "relocating": job.relocating,
            "on": self._nodes(nodes.named(job.nodes)),
            "state_from": self._nodes(origin),
            "state_bytes": max(job.relocation.state_bytes, (self.brought(job) or (0, 0))[1]),
            "arrived_bytes": (self.brought(job) or (0, 0))[0],
            "stranded": bool(job.command.unreachable),
            "lost_processes": self._lost(job.nodes),
            "awaited": self._lost(nodes.awaited(job)),
            "waits_s": nodes.waits_until_s(job) - self._now_s,
            "copy": self._copy(job),
        }

    def _copy(self, job: Gang) -> Lost | None:
        """Return where the newest copy of the state of ``job`` is on another node, and its age."""
        copy = None if self._copies is None else self._copies.newest(job)
        return None if copy is None else Lost(copy.targets, self._now_s - copy.taken_s)

    def _since_s(self, job: Gang, absent: bool) -> float:
        """Return when what ``job`` does now began."""
        if job.verdict.ended_s is not None and job.state.ended:
            return job.verdict.ended_s
        if job.processes.idle_since_s is not None:
            return job.processes.idle_since_s
        if job.command.launched and absent:
            return job.command.launched_s
        setup_since_s = job.setup_since_s if job.state is JobState.RUNNING else None
        return job.lateness.told_s if setup_since_s is None else setup_since_s

    def _of_devices(self, job: Gang) -> dict[str, Any]:
        refusals = job.refusals
        leaves = bool(job.lease) and job.lease != job.wanted
        stuck = places.obstacle(job) or next((rank.stuck for rank in job.there() if rank.stuck), "")
        return {
            "lease": self._names(job.lease),
            "closed": self._closed(job),
            "wanted": self._names(job.wanted),
            "finishing": job.finishing,
            "stuck": stuck,
            "unleased": next((rank.unleased for rank in job.there() if rank.unleased), ""),
            "late": job.lateness.missed,
            "suspend_refused": self._refusal(
                refusals.suspend_error, refusals.suspend.until_s, applies=leaves
            ),
            "resume_refused": self._refusal(refusals.resume_error, refusals.resume.until_s),
        }

    def _refusal(self, error: str, until_s: float, *, applies: bool = True) -> Refusal | None:
        return Refusal(error, until_s - self._now_s) if applies and until_s > self._now_s else None

    def _of_waiting(self, job: Gang) -> dict[str, Any]:
        """Return the facts on the policy and the devices for ``job``, which has no devices."""
        core, planning = self._core, self._core.allocation.planning
        nodes = self._confined_to(job)
        usable = self._usable if nodes is None else [d for d in self._usable if self._node(d) in nodes]
        if job.closed:
            usable = [device for device in usable if device not in job.closed]
        anywhere = nodes is None and not job.running and not job.closed
        taken, free = self._everywhere if anywhere else self._split(usable, job)
        failure, wake_s = planning.failure, planning.wake_s
        again_s = wake_s if failure is None else failure[1]
        return {
            "policy": planning.policy,
            "demand": job.least,
            "quota": self._quota(job),
            "tenant": job.spec.tenant,
            "over_share": core.allocation.waits.is_over_share(job),
            "trial_waits": core.allocation.trials.waits(job),
            "tried": tuple(self._trials(job)),
            "lent_to": tuple(self._borrowers(job)) if job.lent else (),
            "blocked": self._blocked(job),
            "policy_error": "" if failure is None else failure[0],
            "policy_again_s": None if again_s is None or again_s <= self._now_s else again_s - self._now_s,
            "computes": planning.computations.unanswered is not None,
            "bound_to": self._bound_to(job, len(free)),
            "within": () if nodes is None else tuple(map(self._node_name, sorted(nodes))),
            "not_for": tuple((self._node_name(node), why) for node, why in job.command.not_for.items()),
            "no_room": tuple((self._node_name(n), why) for n, why in job.relocation.no_room.items()),
            "lost": self._lost(self._core.state.nodes.silent_since_s),
            "shut_out": job.shut_out,
            "size": len(usable),
            "free": free,
            "taken": taken,
            "started_before": () if job.command.launched else tuple(core.allocation.prestart.started),
            "queued_before": self._queued_before(job),
            "outranked": sum(n for priority, n in self._priorities.items() if priority > job.spec.priority),
            "memory": self._memory(job, usable),
        }

    @cached_property
    def _everywhere(self) -> tuple[tuple[Use, ...], tuple[str, ...]]:
        """The devices that are taken, and those that are free, for a job that has none and may have any."""
        return self._split(self._usable, None)

    def _split(self, usable: Sequence[int], job: Gang | None) -> tuple[tuple[Use, ...], tuple[str, ...]]:
        """Return which of the ``usable`` devices are taken from ``job``, and which are free."""
        uses = {device: self._use(job, device) for device in usable}
        taken = tuple(use for use in uses.values() if use is not None)
        return taken, self._names(device for device, use in uses.items() if use is None)

    def _use(self, job: Gang | None, device: int) -> Use | None:
        """Return the jobs that have or get ``device``. None if it is free, or reserved for ``job`` alone."""
        occupants = tuple(self._core.state.occupants[device])
        if occupants:
            return Use(self._device_names[device], occupants)
        holders = tuple(other.id for other in self._core.state.holders(device) if other is not job)
        return Use(self._device_names[device], holders, used=False) if holders else None

    def _blocked(self, job: Gang) -> Blocked | None:
        """Return a device that ``job`` is to have and cannot enter yet, and the job that is on it."""
        found = self._core.state.blocker(job)
        if found is None:
            return None
        device, other = found
        return Blocked(self._device_names[device], other.id, self.why(other) or "")

    def _quota(self, job: Gang) -> Quota | None:
        limit = self._core.allocation.quotas.limit_of(job)
        if limit is None:
            return None
        inside, first = tuple(limit.inside), limit.next_outside
        return Quota(limit.kind, limit.name, limit.most, limit.used, inside, first, limit.part(job))

    def _trials(self, job: Gang) -> Iterable[Use]:
        for other in self._core.allocation.trials.tried:
            for device in other.borrowed:
                yield Use(self._device_names[device], (other.id,))

    def _borrowers(self, job: Gang) -> Iterable[str]:
        for other in self._core.allocation.trials.tried:
            if not set(other.borrowed).isdisjoint(job.placement):
                yield other.id

    def _bound_to(self, job: Gang, free: int) -> tuple[Use, ...]:
        """Return the devices that the state of ``job`` is bound to, as far as others keep it from them.

        Another job there goes elsewhere when the policy gives ``job`` devices, unless it is bound, too.
        """
        if not job.bound:
            return ()
        home = job.home[: job.least]
        uses = tuple(use for device in home if (use := self._use(job, device)) is not None)
        others = (self._core.jobs[name] for use in uses for name in use.jobs)
        return uses if free < job.least or any(other.bound for other in others) else ()

    def _confined_to(self, job: Gang) -> set[int] | None:
        """Return the nodes that ``job`` must be on. Return None if it may be on all nodes."""
        if job.within:
            nodes = set(job.within)
        elif job.width and not self._core.state.nodes.can_leave(job):
            nodes = set(job.nodes)
        else:
            return None
        return None if len(nodes) == self._node_count else nodes

    def _closed(self, job: Gang) -> tuple[str, ...]:
        """Return why ``job`` may not have devices; if it has some, or can be only on some, about these."""
        about = job.lease or (job.home if job.bound else job.closed)
        closed = self._core.state.closed
        return tuple(
            closed.reason(job, device, self._now_s) for device in sorted(job.closed.intersection(about))
        )

    def _memory(self, job: Gang, usable: Sequence[int]) -> Memory | None:
        """Return the memory that ``job`` needs beside another, if the policy packs and no device has it."""
        total = self._core.state.device_memory_bytes
        needs = self._memory_bytes(job)
        if not (total and needs and self._core.allocation.throughput.packs and job.demand == 1):
            return None
        left = {
            device: total - sum(map(self._memory_bytes, self._core.state.occupants[device].values()))
            for device in usable
        }
        best = max(left, key=lambda device: left[device], default=None)
        if best is None or left[best] >= needs:
            return None
        return Memory(needs, self._device_names[best], max(0, left[best]))

    def _memory_bytes(self, job: Gang) -> int:
        known = job.peak_bytes or self._core.allocation.quotas.array_bytes.get(job.spec.array, 0)
        return job.spec.device_memory_bytes or known

    def _queued_before(self, job: Gang) -> int:
        level = self._core.allocation.planning.level(job)
        return 0 if level is None else sum(n for other, n in self._levels.items() if other < level)

    @cached_property
    def _levels(self) -> Counter[int]:
        """The number of waiting jobs in each queue of the policy."""
        planning = self._core.allocation.planning
        waiting = (job for job in self._core.jobs.values() if job.shown and not job.running)
        return Counter(level for job in waiting if (level := planning.level(job)) is not None)

    @cached_property
    def _priorities(self) -> Counter[int]:
        """The number of jobs of each priority that the policy may choose."""
        return Counter(job.spec.priority for job in self._core.jobs.values() if job.shown)

    @cached_property
    def _usable(self) -> list[int]:
        """The devices of nodes that are not lost."""
        lost = self._core.state.nodes.silent_since_s
        return [device for device in self._core.state.present if self._node(device) not in lost]

    @cached_property
    def _device_names(self) -> tuple[str, ...]:
        return tuple(map(str, self._core.devices))

    @cached_property
    def _node_count(self) -> int:
        return len({device.node for device in self._core.devices})

    def _node(self, device: int) -> int:
        return self._core.state.nodes.of((device,))[0]

    def _lost(self, nodes: Iterable[int]) -> tuple[Lost, ...]:
        lost = self._core.state.nodes.silent_since_s
        found = sorted(set(nodes) & lost.keys())
        return tuple(Lost(self._node_name(node), self._now_s - lost[node]) for node in found)

    def _node_name(self, node: int) -> str:
        return _node_words(self._core.state.nodes.named((node,))[0])

    def _nodes(self, names: Iterable[str]) -> str:
        """Return ``names`` of nodes in words. Return an empty text if there is only one node."""
        return "" if self._node_count == 1 else " and ".join(map(_node_words, dict.fromkeys(names)))

    def _names(self, devices: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._device_names[device] for device in devices)


def _node_words(name: str) -> str:
    return f"node {name}" if name else "the scheduler's node"
