"""Policies that give nobody rest, for worlds: one plans anew whenever it can, one goes between two plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Migrate, Plan, Policy, Start, Suspend, View

QUANTUM_S = 2.0
#: Options of the policies that users choose, so that slices are short.
OPTIONS: dict[str, dict[str, float]] = {"rr": {"quantum_s": QUANTUM_S}, "las": {"quantum_s": QUANTUM_S}}
NAMES = (
    "restless",
    "restless",
    "alternating",
    "alternating",
    "rr",
    "rr",
    "las",
    "2das",
    "optimus",
    "gandiva",
)
#: The restless policies look again after so long.
_AGAIN_S = 0.3
_SAME_WIDTH_S = 6.0


def policy_of(
    name: str, seed: int, placement: str, *, shares: bool, options: Mapping[str, object] | None = None
) -> Policy:
    """Return a new policy of that name; without ``options`` with those of ``OPTIONS``."""
    if name == "restless":
        return Restless(seed, placement, shares=shares)
    if name == "alternating":
        return Alternating(placement)
    return make_policy(name, dict(OPTIONS.get(name, {}) if options is None else options))


class Restless:
    """Plans anew each time that it is asked: starts, moves, packs and suspends as it likes."""

    name = "restless"
    needs_durations = False

    def __init__(self, seed: int, placement: str, *, shares: bool = False) -> None:
        self.placement = make_placement(placement) if placement else None
        self._seed, self._shares, self._plans = seed, shares, 0

    def plan(self, view: View) -> Plan:
        self._plans += 1
        draw = Random(f"{self._seed}-{self._plans}")  # the same plans when the journal is replayed
        board = _Board(view)
        leaving = [job for job in view.running() if draw.random() < 0.25]
        for job in leaving:
            board.leave(job)
        waiting = [job for job in view.waiting() if draw.random() < 0.7]
        draw.shuffle(waiting)
        decisions: list[Start | Suspend | Migrate] = []
        for job in [*leaving, *waiting]:
            there = board.for_job(job, draw)
            size = min(_width(job, view.now_s) or draw.randint(job.least, job.most), len(there))
            if self._shares and job.demand == job.most == 1 and (beside := board.shared):
                there, size = [draw.choice(beside)], 1
            if size >= job.least and draw.random() < 0.8:
                devices = tuple(draw.sample(there, size))
                shared = self._shares and size == 1
                board.take(devices, shared=shared)
                decisions.append((Migrate if job.running else Start)(job.id, devices, shared))
            elif job.running:
                decisions.append(Suspend(job.id))
        return Plan(decisions, wake_at_s=view.now_s + _AGAIN_S)


class Alternating:
    """Goes between two plans: the jobs that came first and from the first device, and the other way round."""

    name = "alternating"
    needs_durations = False

    def __init__(self, placement: str) -> None:
        self.placement = make_placement(placement) if placement else None
        self._back, self._planned_s = False, -1.0

    def plan(self, view: View) -> Plan:
        # Asked twice at one moment it stays with its plan: a core may ask until the answer is empty.
        self._back ^= view.now_s > self._planned_s
        self._planned_s = view.now_s
        wanted, board = dict[str, tuple[int, ...]](), _Board(view)
        for job in view.running():
            board.leave(job)
        jobs = list(view.jobs.values())
        for job in reversed(jobs) if self._back else jobs:
            there = board.for_job(job)
            size = min(_width(job, view.now_s) or (job.most if self._back else job.least), len(there))
            if size >= job.least:
                wanted[job.id] = tuple(there[-size:] if self._back else there[:size])
                board.take(wanted[job.id])
        decisions: list[Start | Suspend | Migrate] = []
        for job in jobs:
            devices = wanted.get(job.id)
            if job.running and devices is None:
                decisions.append(Suspend(job.id))
            elif devices is not None and not job.running:
                decisions.append(Start(job.id, devices))
            elif devices is not None and set(devices) != set(job.placement):
                decisions.append(Migrate(job.id, devices))
        return Plan(decisions, wake_at_s=view.now_s + _AGAIN_S)


def _width(job: Job, now_s: float) -> int:
    """Return how many devices a job is to have whose command is started anew for that; 0: any number.

    It stays the same for a while: the core keeps no such job from being started anew before it has trained.
    """
    if not job.spec.relaunch:
        return 0
    return job.most if int(now_s / _SAME_WIDTH_S) % 2 else job.least


class _Board:
    """The devices that a plan may still give away."""

    def __init__(self, view: View) -> None:
        self._node_of = view.cluster.node_of
        self._free = {device for node in view.free().on_node for device in node}
        #: Devices with one job on each, which this plan has put there and which allows another.
        self.shared: list[int] = []
        held = [device for job in view.running() for device in job.placement]
        self._packed = {device for device in held if held.count(device) > 1}

    def leave(self, job: Job) -> None:
        """``job`` gives its devices back, unless others are on them."""
        for device in job.placement:
            if device in self._packed:
                self._packed.discard(device)
            else:
                self._free.add(device)

    def for_job(self, job: Job, draw: Random | None = None) -> list[int]:
        """Return what ``job`` may have of what is free: all of it, or that of one node."""
        there = sorted(self._free)
        if not job.within:
            return there
        nodes = [[device for device in there if self._node_of[device] == node] for node in job.within]
        fitting = [node for node in nodes if len(node) >= job.least]
        if not fitting:
            return []
        return fitting[0] if draw is None else draw.choice(fitting)

    def take(self, devices: Sequence[int], *, shared: bool = False) -> None:
        """Give ``devices`` away; ``shared``: to a job that allows another one beside it."""
        for device in devices:
            if device in self.shared:
                self.shared.remove(device)
            elif shared:
                self.shared.append(device)
        self._free -= set(devices)
