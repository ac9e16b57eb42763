"""Let every job fail early on a small pool, then hand it to any policy.

Source: the lessons of the Philly study (Jeon et al., ATC 2019, section 6) and the profiler of Chronus
(SoCC 2021, section 4.1): many jobs end within minutes, by mistake or because they are short, and need not be
scheduled at all.
"""

from __future__ import annotations

from math import inf

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.one_node import on_one_node
from gpuslice.sched_core.policy import Changes, Decision, Plan, Policy, Start, Stop, Suspend, View

from .wrapper import Wrapper

#: From the end of a trial to the moment the other policy sees the job, which is suspended meanwhile.
_HAND_OVER_S = 1.0


class TrialPool(Wrapper):
    """A policy that first runs jobs on the last nodes, in order of arrival, and gives ``policy`` the rest.

    A job that does not fit into the pool skips the trial. One that does not fit into the rest is stopped. One
    that stays on the node where it has trained skips the trial, too, or has trained there and stays.

    Parameters
    ----------
    policy
        Decides about jobs that survived their trial.
    nodes
        Size of the pool.
    trial_s
        Running time after which a job leaves the pool.

    Attributes
    ----------
    counters
        Those of ``policy``, jobs that ended during their trial, and jobs stopped as too large.
    """

    def __init__(self, policy: Policy, nodes: int, trial_s: float) -> None:
        if nodes < 1 or not trial_s > 0:
            raise ConfigError(
                f"trial_nodes={nodes}, trial_s={trial_s} are not possible", "both must be above 0"
            )
        super().__init__(policy)
        self._nodes = nodes
        self._trial_s = trial_s
        self._ended = 0
        self._refused = 0

    @property
    def keeps_to_nodes(self) -> bool:
        """False: a job leaves the pool after its trial."""
        return False

    @property
    def counters(self) -> dict[str, int]:
        """Return the policy's counters, and how many jobs ended in their trial or were too large for one."""
        return {**super().counters, "ended_in_trial": self._ended, "too_large_for_trials": self._refused}

    def plan(self, view: View) -> Plan:
        """Run trials on the pool, and let the policy plan for the other jobs."""
        if view.changes.reset:
            self._reset(view)
        changes = self._inner.changes
        decisions = self._follow(view, changes)
        self._inner.follow(view)
        for name, due_s in list(self._handed_over_s.items()):
            if due_s <= view.now_s:
                del self._handed_over_s[name]
                self._pass_on(view.jobs[name], changes)
        inner = self.policy.plan(self._inner)
        self._inner.changes = Changes()
        decisions += inner.decisions
        decisions += self._start_trials()
        times = [
            inf if inner.wake_at_s is None else inner.wake_at_s,
            *self._ends_s.values(),
            *self._handed_over_s.values(),
        ]
        wake_s = min(times)
        return Plan(decisions, wake_s if wake_s < inf else None)

    def _reset(self, view: View) -> None:
        sizes = view.cluster.node_sizes
        if len(sizes) <= self._nodes:
            raise ConfigError(
                f"a trial pool of {self._nodes} nodes leaves nothing of {view.cluster}",
                "choose a smaller pool",
            )
        nodes = range(len(sizes))
        self._pool = nodes[len(sizes) - self._nodes :]
        rest = nodes[: self._pool.start]
        #: Of the rest, also those that cannot be had now.
        self._rest_size = sum(node in rest for node in view.cluster.node_of)
        self._jobs: dict[str, Job] = {}
        self._inner = view.narrowed(view.cluster.without(self._pool), self._jobs)
        held = {device for job in view.running() for device in job.placement}
        pool = view.cluster.without(rest)
        self._pool_size = pool.size
        self._free = FreeDevices.besides(pool, held)
        self._queue: dict[str, Job] = {}
        #: When the trial of a job on the pool is over, and when one that passed is handed over.
        self._ends_s: dict[str, float] = {}
        self._handed_over_s: dict[str, float] = {}

    def _follow(self, view: View, changes: Changes) -> list[Decision]:
        decisions: list[Decision] = []
        changes.succeeded += [job for job in view.changes.succeeded if job.id in self._jobs]
        for job in view.changes.finished:
            if self._jobs.pop(job.id, None) is not None:
                if not changes.reset:
                    changes.finished.append(job)
            elif self._ends_s.pop(job.id, None) is not None:
                self._free.give(job.placement)
                self._ended += 1
            self._queue.pop(job.id, None)
            self._handed_over_s.pop(job.id, None)
        for name in [name for name, end_s in self._ends_s.items() if end_s <= view.now_s]:
            if self._left_s(view.jobs[name], view.now_s) == inf:
                self._ends_s[name] = inf
                continue
            del self._ends_s[name]
            decisions.append(Suspend(name))
            self._free.give(view.jobs[name].placement)
            self._handed_over_s[name] = view.now_s + _HAND_OVER_S
        for job in view.jobs.values() if view.changes.reset else view.changes.arrived:
            decisions += self._sort_in(job, view, changes)
        if not changes.reset:
            changes.begun += [job for job in view.changes.begun if job.id in self._jobs]
        self._now_s = view.now_s
        return decisions

    def _sort_in(self, job: Job, view: View, changes: Changes) -> list[Decision]:
        """Let a new job wait for its trial, skip it, or end because it could never run afterwards."""
        if job.demand > self._rest_size:
            self._refused += 1
            reason = f"it asks for {job.demand} devices; the trial pool leaves {self._rest_size}"
            return [Stop(job.id, reason)]
        on_pool = job.running and view.cluster.node_of[job.placement[0]] in self._pool
        left_s = self._left_s(job, view.now_s)
        if on_pool:
            self._ends_s[job.id] = view.now_s + max(left_s, _HAND_OVER_S)
        elif job.running or left_s <= 0 or not (left_s == inf or self._fits(job, view)):
            self._pass_on(job, changes)
        else:
            self._queue[job.id] = job
        return []

    def _left_s(self, job: Job, now_s: float) -> float:
        """Return how long ``job`` stays on the pool from now on."""
        leaves = not job.within or not set(job.within).issubset(self._pool)
        return self._trial_s - job.executed_at(now_s) if leaves else inf

    def _fits(self, job: Job, view: View) -> bool:
        """Return True if ``job`` can have its trial on the pool and run elsewhere afterwards."""
        if not job.within:
            return job.demand <= self._pool_size
        largest = max((view.cluster.node_sizes[node] for node in self._pool if node in job.within), default=0)
        return job.demand <= largest and not job.spec.relaunch

    def _devices(self, job: Job) -> tuple[int, ...] | None:
        """Return devices of the pool for ``job``. Return None if too few are free."""
        if job.within:
            return on_one_node(job, job.demand, self._free)
        if job.demand > self._free.total:
            return None
        free = [device for node in self._free.on_node for device in node if device not in job.closed]
        return tuple(free[: job.demand]) if len(free) >= job.demand else None

    def _pass_on(self, job: Job, changes: Changes) -> None:
        self._jobs[job.id] = job
        if not changes.reset:
            changes.arrived.append(job)

    def _start_trials(self) -> list[Decision]:
        decisions: list[Decision] = []
        for name, job in list(self._queue.items()):
            devices = self._devices(job)
            if devices is None:
                break
            self._free.take(devices)
            del self._queue[name]
            self._ends_s[name] = self._now_s + self._left_s(job, self._now_s)
            decisions.append(Start(name, devices))
        return decisions
