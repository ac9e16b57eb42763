"""Orders as the simulator published with Tiresias computes them, mistakes included; see docs/simulate.md."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.one_node import choose_devices
from gpuslice.sched_core.placement.placement import Count, Placement
from gpuslice.sched_core.policies.ranked import RankedPolicy
from gpuslice.sched_core.policies.ranking import Entry, Key
from gpuslice.sched_core.policies.tiresias.gittins import yarn_services
from gpuslice.sched_core.policy import Plan, Start, View


class PublishedShortest(RankedPolicy[Entry]):
    """Shortest remaining time (``shortest``) or GPU time (``shortest-gpu``), preemptive.

    Its list is sorted in place at every event, and ties keep their order. So of equal jobs, one that was
    waiting already comes first, then one that runs, then one that has just arrived.

    Parameters
    ----------
    by_devices
        Order by remaining time multiplied by devices.
    """

    name = "published-shortest"
    needs_durations = True

    def __init__(self, placement: Placement | None = None, *, by_devices: bool = False) -> None:
        super().__init__(placement)
        self.by_devices = by_devices
        self._event = 0

    def remaining(self, entry: Entry, view: View) -> float:
        """Return the remaining time by which jobs are ordered."""
        return view.remaining_s(entry.job) * (entry.size if self.by_devices else 1)

    def plan(self, view: View) -> Plan:
        self._event += 1
        return super().plan(view)

    def waiting_key(self, entry: Entry, view: View) -> Key:
        return (self.remaining(entry, view), self._event, 2, entry.job.number)

    def update(self, view: View) -> None:
        self.ranking.rekey_running(lambda place, entry: self._running_key(place, entry, view))

    def _running_key(self, place: int, entry: Entry, view: View) -> Key:
        remaining = self.remaining(entry, view)
        # Several events may fall on one second: who did not get ahead keeps its place among equals.
        return entry.key if remaining == entry.key[0] else (remaining, self._event, 1, place)


class PublishedExpected(RankedPolicy[Entry]):
    """``shortest-expected``: order by expected remaining time, preemptive.

    The expectation of every running job is written into the job that arrived last, so all others keep what
    they had, and the newest one wanders through the list with whatever ran last in it.
    """

    name = "published-expected"

    def __init__(self, placement: Placement | None = None) -> None:
        super().__init__(placement)
        self.services = sorted(yarn_services())
        self.means = _means_above(self.services)
        self._newest: Entry | None = None
        self._newest_since_s = 0.0
        self._sequence = 0

    def expected(self, executed_s: float) -> float:
        """Return the mean of the samples above ``executed_s``, without the largest.

        The definition would subtract ``executed_s``.
        """
        return self.means[bisect_right(self.services, executed_s)]

    def waiting_key(self, entry: Entry, view: View) -> Key:
        self._newest, self._newest_since_s = entry, view.now_s
        self._sequence += 1
        return (self.expected(0), self._sequence)

    def update(self, view: View) -> None:
        newest, running = self._newest, self.ranking.running
        if newest is None or not running:
            return
        value = self.expected(running[-1][1].job.executed_at(view.now_s))
        if value != newest.key[0]:
            self._sequence += 1
            was_behind = value < newest.key[0] or self._newest_since_s == view.now_s
            self.ranking.rekey(newest, (value, self._sequence if was_behind else -self._sequence))

    def left(self, entry: Entry) -> None:
        if entry is self._newest:
            self._newest = None


class PublishedLongestPending:
    """``lpjf``: order of arrival, as the pending time it sorts by is never written.

    The list is walked while started jobs are taken out of it, so whoever follows a started job is passed over
    until the next event; the first job that does not fit ends the walk. No preemption.
    """

    name = "published-lpjf"
    needs_durations = False

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement: Placement = Count() if placement is None else placement
        self._pending: list[Job] = []

    def plan(self, view: View) -> Plan:
        if view.changes.reset:
            self._pending = list(view.waiting())
        self._pending += view.changes.arrived
        free = view.free()
        decisions: list[Start] = []
        position = 0
        while position < len(self._pending):
            job = self._pending[position]
            devices = choose_devices(self.placement, job, free)
            if devices is None:
                break
            free.take(devices)
            self.placement.placed(job, devices)
            decisions.append(Start(job.id, devices))
            del self._pending[position]
            position += 1
        return Plan(decisions)


def _means_above(services: Sequence[int]) -> list[float]:
    """Return, for each number of skipped samples, the mean of the others without the last one."""
    last, sums = len(services) - 1, [0, *accumulate(services)]
    means = [round((sums[last] - sums[first]) / (last - first), 2) for first in range(last)]
    return [*means, services[last], 0.0]
