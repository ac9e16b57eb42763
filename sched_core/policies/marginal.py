"""Policies that give devices one at a time to whoever gains most, anew at every interval."""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from math import floor

from gpuslice.errors import ConfigError
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import Plan, View

from .curves import LossHistory, SpeedCurve
from .target import difference, place_counts

#: Smaller is more urgent.
Urgency = tuple[float, ...]


class MarginalPolicy(ABC):
    """Base: greedy by marginal gain, among jobs that report losses.

    A job that is not elastic gets all its devices in one step or none. Between intervals nobody loses
    devices; whoever waits may start on free ones.

    Parameters
    ----------
    interval_s
        Time between two allocations.
    """

    name = "marginal"
    needs_durations = False

    def __init__(self, interval_s: float) -> None:
        if not interval_s > 0:
            raise ConfigError(f"interval_s={interval_s} is not a time", "give a positive number of seconds")
        self.interval_s = interval_s
        self.losses: dict[str, LossHistory] = {}
        self.speeds: dict[str, SpeedCurve] = {}
        self._next_s = 0.0

    @abstractmethod
    def urgency(self, job: Job, have: int, get: int, view: View) -> Urgency:
        """Of raising ``job`` from ``have`` to ``get`` devices."""

    def plan(self, view: View) -> Plan:
        """Allocate anew if the interval is over, else only what is free."""
        if view.changes.reset:
            self.losses, self.speeds = {}, {}
            self._next_s = view.now_s
        for job in view.changes.finished:
            self.losses.pop(job.id, None)
            self.speeds.pop(job.id, None)
        for job in view.jobs.values() if view.changes.reset else view.changes.arrived:
            self.losses[job.id], self.speeds[job.id] = LossHistory(), SpeedCurve()
        anew = view.now_s >= self._next_s
        if anew:
            self._observe(view)
            self._next_s = (floor(view.now_s / self.interval_s) + 1) * self.interval_s
        held = {} if anew else {job.id: len(job.placement) for job in view.running()}
        counts = self._allocated(view, held)
        # Woken even if everybody runs: a curve needs points from the beginning.
        wake_at_s = self._next_s if view.jobs else None
        return Plan(difference(view, place_counts(view, counts)), wake_at_s)

    def _observe(self, view: View) -> None:
        for job in view.running():
            loss = view.loss(job)
            if loss is not None:
                self.losses[job.id].add(job.progress_at(view.now_s), loss)
            self.speeds[job.id].add(len(job.placement), job.rate)

    def _allocated(self, view: View, held: dict[str, int]) -> dict[str, int]:
        """Devices by job: ``held`` and what is left, step by step to the most urgent."""
        counts = dict(held)
        left = view.cluster.size - sum(held.values())
        steps = [
            (self.urgency(job, 0, _least(job), view), job.number, job, 0, _least(job))
            for job in view.jobs.values()
            if job.id not in held
        ]
        heapify(steps)
        while steps and left > 0:
            _, number, job, have, get = heappop(steps)
            if get - have > left:
                continue
            left -= get - have
            counts[job.id] = get
            if get < _most(job):
                heappush(steps, (self.urgency(job, get, get + 1, view), number, job, get, get + 1))
        return counts


def _least(job: Job) -> int:
    return job.spec.min_demand or job.demand


def _most(job: Job) -> int:
    return max(job.spec.max_demand or job.demand, _least(job))
