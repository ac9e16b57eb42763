"""Policies that give devices one at a time to whoever gains most, anew at every interval."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from math import floor

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.nodes import fewest_nodes
from gpuslice.sched_core.placement.one_node import most_on_one_node, node_before, on_one_node
from gpuslice.sched_core.policy import Decision, Migrate, Plan, Start, Suspend, View
from gpuslice.sched_core.speedup import SpeedCurve

from .curves import LossHistory, refit

#: Smaller is more urgent.
Urgency = tuple[float, ...]
#: Urgency, number, job, ``have`` and ``get`` of raising a job; no two jobs have the same number.
Step = tuple[Urgency, int, Job, int, int]


class MarginalPolicy(ABC):
    """Base of policies that give each device to the job that gains most, by reported losses.

    A job that is not elastic gets all its devices in one step or none; an elastic one no more than make it
    faster. That is measured; before, devices are assumed to add up. Between intervals nobody loses devices;
    whoever waits may start on free ones.

    Jobs that wait show nothing new, so their first steps stay sorted; an allocation looks at the jobs that
    run and at the first few that wait of each size.

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
        self._free: FreeDevices
        self._running: dict[str, Job] = {}
        #: First steps of waiting jobs, most urgent first, by the devices they ask for; and each job's own.
        self._waiting: dict[int, list[Step]] = {}
        self._first: dict[str, Step] = {}
        #: Devices that all jobs could use together.
        self._usable = 0

    @abstractmethod
    def urgency(self, job: Job, have: int, get: int, view: View) -> Urgency:
        """Return the gain of raising ``job`` from ``have`` to ``get`` devices.

        It must not change while ``job`` waits.
        """

    def plan(self, view: View) -> Plan:
        """Allocate all devices anew if the interval is over, else only the free ones."""
        self._follow(view)
        if view.now_s >= self._next_s:
            self._observe(view)
            self._next_s = (floor(view.now_s / self.interval_s) + 1) * self.interval_s
            counts = self._anew(view)
        else:
            counts = self._allocated(view, [], self._free.total, between=True)
        # Woken even if everybody runs: a curve needs points from the beginning.
        wake_at_s = self._next_s if view.jobs else None
        return Plan(self._decided(view, counts), wake_at_s)

    def _follow(self, view: View) -> None:
        """Note which jobs came, ended or made progress since the last plan."""
        if view.changes.reset:
            # What was seen of jobs is not forgotten.
            self.losses = {name: seen for name, seen in self.losses.items() if name in view.jobs}
            self.speeds, self._running, self._waiting, self._first = {}, {}, {}, {}
            self._next_s, self._usable, self._free = view.now_s, 0, view.free()
        for job in view.changes.finished:
            del self.losses[job.id], self.speeds[job.id]
            self._usable -= job.most
            if self._running.pop(job.id, None) is not None:
                self._free.give(job.placement)
            else:
                self._leave_line(job)
        for job in view.jobs.values() if view.changes.reset else view.changes.arrived:
            self.losses.setdefault(job.id, LossHistory())
            self.speeds[job.id] = SpeedCurve()
            self._note_speeds(job, view)  # of former jobs of its kind
            self._usable += job.most
            if job.running:
                self._running[job.id] = job
            else:
                self._join_line(job, view)

    def _join_line(self, job: Job, view: View) -> None:
        least = job.least
        step = self._first[job.id] = (self.urgency(job, 0, least, view), job.number, job, 0, least)
        insort(self._waiting.setdefault(least, []), step)

    def _leave_line(self, job: Job) -> None:
        step = self._first.pop(job.id)
        line = self._waiting[step[4]]
        del line[bisect_left(line, step)]

    def _observe(self, view: View) -> None:
        for job in self._running.values():
            loss = view.loss(job)
            if loss is not None:
                self.losses[job.id].add(job.progress_at(view.now_s), loss)
            self._note_speeds(job, view)

    def _note_speeds(self, job: Job, view: View) -> None:
        self.speeds[job.id].learn(view.throughput.speeds(job))

    def _gains(self, job: Job, get: int) -> bool:
        """Return True if ``job`` may have ``get`` devices and is faster than on one less."""
        return get <= job.most and self.speeds[job.id].gains(get, job.demand)

    def _widest(self, job: Job) -> int:
        """Return the largest number of devices that ``job`` can use."""
        count = job.least
        while self._gains(job, count + 1):
            count += 1
        return count

    def _anew(self, view: View) -> dict[str, int]:
        """Return how many devices each job gets if all devices are given out again."""
        if self._usable <= view.cluster.size:
            return {job.id: self._widest(job) for job in view.jobs.values()}
        refit(self.losses[name] for name in self._running)
        steps = [
            (self.urgency(job, 0, job.least, view), job.number, job, 0, job.least)
            for job in self._running.values()
        ]
        counts = dict.fromkeys(self._running, 0)
        counts.update(self._allocated(view, steps, view.cluster.size))
        return counts

    def _allocated(
        self, view: View, steps: list[Step], left: int, *, between: bool = False
    ) -> dict[str, int]:
        """Return numbers of devices: ``left`` devices go one step at a time to the most urgent job.

        ``between`` intervals nobody makes room, so who needs one node and finds none is passed over.
        """
        counts: dict[str, int] = {}
        heads = dict.fromkeys(self._waiting, 0)
        steps += [line[0] for least, line in self._waiting.items() if line and least <= left]
        heapify(steps)
        while steps and left > 0:
            _, number, job, have, get = heappop(steps)
            if get - have <= left and not (between and self._finds_no_node(job)):
                left -= get - have
                counts[job.id] = get
                if self._gains(job, get + 1):
                    heappush(steps, (self.urgency(job, get, get + 1, view), number, job, get, get + 1))
            # What is left never grows: once a size does not fit, nobody of that size will.
            if not have and not job.running and get <= left:
                heads[get] += 1
                if heads[get] < len(self._waiting[get]):
                    heappush(steps, self._waiting[get][heads[get]])
        return counts

    def _finds_no_node(self, job: Job) -> bool:
        """Return True if ``job`` waits for one node, and no node has its least number of devices now."""
        return bool(job.within) and not job.running and most_on_one_node(job, self._free) < job.least

    def _decided(self, view: View, counts: dict[str, int]) -> list[Decision]:
        """Return decisions that bring about ``counts``.

        A job that keeps its number stays; then the largest come first.

        Before these come jobs that need one node, first those that run: they have the least choice. Last
        come those that are to have nothing: they stay if whoever was to have their devices found no node.
        """
        moving: list[tuple[bool, bool, bool, int, int, Job]] = []
        decisions: list[tuple[int, Decision]] = []
        for name, count in counts.items():
            job = view.jobs[name]
            if job.running and len(job.placement) == count:
                continue
            if job.running:
                self._free.give(job.placement)
            picky = bool(job.within)
            moving.append((not count, not picky, picky and not job.running, -count, job.number, job))
        for *_, negative, number, job in sorted(moving, key=lambda move: move[:5]):
            devices = self._devices(job, -negative)
            if devices is not None:
                self._free.take(devices)
            decision = self._change(job, devices, view)
            if decision is not None:
                decisions.append((number, decision))
        return [decision for _, decision in sorted(decisions, key=lambda item: item[0])]

    def _devices(self, job: Job, count: int) -> tuple[int, ...] | None:
        """Return ``count`` devices for ``job`` (0: those that it holds); None if too few are free."""
        if not count:
            return job.placement if job.running and self._free.has(job.placement) else None
        if job.within:
            return self._on_one_node(job, count)
        if not job.closed:
            return fewest_nodes(count, self._free)
        open_to_it = self._free.without(job.closed)
        count = min(count, open_to_it.total)
        return fewest_nodes(count, open_to_it) if count >= job.least else None

    def _on_one_node(self, job: Job, count: int) -> tuple[int, ...] | None:
        """Return ``count`` devices of one node, or as many as a node has.

        While it runs it grows on its own node, and leaves that only if it would have to shrink there.
        """
        before = node_before(job, self._free)
        free = self._free.without(job.closed)
        here = 0 if before is None or before not in job.within else len(free.on_node[before])
        if not job.running or here < min(count, len(job.placement)):
            here = most_on_one_node(job, free)
        count = min(count, here)
        return on_one_node(job, count, free) if count >= job.least else None

    def _change(self, job: Job, devices: tuple[int, ...] | None, view: View) -> Decision | None:
        if devices is None:
            if not job.running:
                return None
            del self._running[job.id]
            self._join_line(job, view)
            return Suspend(job.id)
        if job.running:
            return Migrate(job.id, devices) if devices != job.placement else None
        self._leave_line(job)
        self._running[job.id] = job
        return Start(job.id, devices)
