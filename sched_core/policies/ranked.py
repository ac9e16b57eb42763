"""Policies that are an order: whoever is first in it and fits, runs.

A subclass says what the key of a job is and when keys change; this base follows the changes, keeps the
ranking, places jobs and turns the difference into decisions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Generic

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.one_node import choose_devices, kind_of
from gpuslice.sched_core.placement.placement import Count, Placement
from gpuslice.sched_core.policy import Decision, Migrate, Plan, Start, Suspend, View

from .ranking import E, Entry, Key, Ranking, SizeClass


class RankedPolicy(ABC, Generic[E]):
    """Base of the policies that are an order of jobs, by a key.

    Parameters
    ----------
    placement
        Where jobs go; any devices if not given.
    """

    name = "ranked"
    needs_durations = False
    #: The first job that does not fit blocks the others.
    strict = False
    #: Running jobs may have to give way. Where not, keys of running jobs must come before all waiting ones.
    preemptive = True
    #: Nobody is suspended within ``View.least_slice_s``; not where slices are that long anyway.
    sparing = True
    #: A job that is to stay on its node is placed nowhere else.
    keeps_to_nodes = True
    #: What is kept for each job.
    entry_type: type[Any] = Entry

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement: Placement = Count() if placement is None else placement
        self._entries: dict[str, E] = {}
        #: Devices that all unfinished jobs ask for, together.
        self._asked = 0
        self._was_crowded = False
        #: Entries started or suspended in this plan, with whether they ran before it.
        self._touched: dict[E, bool] = {}
        #: When the first slice that is too short to be ended will be long enough; infinite if there is none.
        self._spared_until_s = inf
        #: Somebody had to go for the sake of a placement since the ranking was last repaired.
        self._made_room = False

    @abstractmethod
    def waiting_key(self, entry: E, view: View) -> Key:
        """Return the key of a waiting entry: a new job, or any waiting job after a reset."""

    def running_key(self, entry: E, view: View) -> Key:
        """Return the key of an entry that runs already when the policy starts from nothing (a reset)."""
        return self.waiting_key(entry, view)

    def reset_order(self, jobs: Iterable[Job]) -> Iterable[Job]:
        """Return ``jobs`` in the order in which they get their keys after a reset."""
        return jobs

    def admitted(self, entry: E, view: View) -> None:
        """Initialize a new entry before it gets its first key.

        After a reset the job may have run before.
        """

    def begun(self, entry: E, view: View) -> None:
        """Note that a running entry makes progress from now on, perhaps later than expected."""

    def has_trained(self, entry: E, view: View) -> None:
        """Change the key of a waiting entry that has trained since the plan suspended it."""

    def update(self, view: View) -> None:
        """Change keys because time passed. Called before each decision."""

    def settled(self, started: Sequence[E], suspended: Sequence[E], view: View) -> None:
        """Change keys after the decision.

        ``started`` and ``suspended`` come most urgent first.
        """

    def wake_at(self, view: View) -> float | None:
        """Return when keys will change although nothing happens, later than ``view.now_s``."""
        return None

    def relocated(self, moves: Mapping[Job, tuple[int, ...]]) -> None:
        """Note that jobs were moved; see ``defragmenting.policy.Relocatable``."""
        moved = [(self._entries[job.id], devices) for job, devices in moves.items()]
        for entry, _ in moved:
            self._free.give(entry.devices)
        for entry, devices in moved:
            entry.devices = devices
            self._free.take(devices)

    @property
    def crowded(self) -> bool:
        """Return True if any job waits."""
        return len(self._entries) > len(self.ranking.running)

    @property
    def contended(self) -> bool:
        """Return True if the order matters now: a job was left waiting, or demand exceeds the devices."""
        return self._was_crowded or self._asked > self._capacity

    def plan(self, view: View) -> Plan:
        """Return a plan that runs whichever job is first and fits."""
        if view.changes.reset:
            self._rebuild(view)
        else:
            for job in view.changes.finished:
                self._forget(job)
            for job in view.changes.arrived:
                self._admit(job, view)
            for job in view.changes.begun:
                if (entry := self._entries.get(job.id)) is not None and entry.running:
                    self.begun(entry, view)
            for job in view.changes.settled:
                if (entry := self._entries.get(job.id)) is not None and not entry.running:
                    self.has_trained(entry, view)
        self.update(view)
        self._touched.clear()
        self._spare(view)
        decisions = self._differences(view)
        self._was_crowded = self.crowded
        return Plan(decisions, self._wake_s(view))

    def _spare(self, view: View) -> None:
        """Choose which entries run, but suspend no job whose slice has not lasted ``least_slice_s`` yet.

        Such jobs go first meanwhile.
        """
        self._spared_until_s, least_s, ranking = inf, view.least_slice_s, self.ranking
        if not (least_s and self.sparing and self.preemptive and self.crowded):
            self._select()
            return
        ranking.refresh()
        young = [entry for _, entry in ranking.running if entry.job.since_s + least_s > view.now_s]
        own_keys = [entry.key for entry in young]
        for entry in young:
            self._spared_until_s = min(self._spared_until_s, entry.job.since_s + least_s)
            ranking.rekey(entry, (-inf, entry.job.number))
        self._select()
        for entry, key in zip(young, own_keys, strict=True):
            ranking.rekey(entry, key)

    def _wake_s(self, view: View) -> float | None:
        wake_s = self.wake_at(view)
        if self._spared_until_s == inf or not self.crowded:
            return wake_s
        return self._spared_until_s if wake_s is None else min(wake_s, self._spared_until_s)

    def _rebuild(self, view: View) -> None:
        kind = partial(kind_of, self.placement)
        self.ranking: Ranking[E] = Ranking(view.cluster.size, strict=self.strict, kind=kind)
        self._free = view.free()
        self._capacity = view.cluster.size
        self._entries.clear()
        self._asked = 0
        for job in self.reset_order(view.jobs.values()):
            self._admit(job, view)

    def _admit(self, job: Job, view: View) -> None:
        entry: E = self.entry_type(job, kind_of(self.placement, job))
        self._entries[job.id] = entry
        self._asked += entry.size
        entry.running = job.running
        if job.running:
            entry.devices = job.placement
        self.admitted(entry, view)
        self.ranking.add(entry, (self.running_key if job.running else self.waiting_key)(entry, view))

    def _forget(self, job: Job) -> None:
        entry = self._entries.pop(job.id)
        self._asked -= entry.size
        if entry.running:
            self._free.give(entry.devices)
        self.ranking.remove(entry)
        self.left(entry)

    def left(self, entry: E) -> None:
        """Note that ``entry`` is gone for good."""

    def _select(self) -> None:
        """Start and suspend entries until the order and the placement agree."""
        blocked: set[SizeClass] = set()
        # Of jobs that stay on a node, or may not have all devices: nobody else waits for these in particular.
        passed: set[SizeClass] = set()
        again = True
        while again and (flipped := self.ranking.repair(blocked, passed)):
            self._made_room = False
            for entry in flipped:
                self._touched.setdefault(entry, not entry.running)
                if not entry.running:
                    self._vacate(entry)
            failed = False
            for entry in flipped:
                if not entry.running:
                    continue
                if not failed and not self._place(entry):
                    failed = True
                    picky = entry.job.stays_on is not None or entry.job.closed
                    (passed if picky else blocked).add(entry.size_class)
                if failed:  # Whoever comes later is decided on anew: there is more room for others now.
                    self.ranking.withdraw(entry)
            again = failed or self._made_room

    def _place(self, entry: E) -> bool:
        free = self._free
        job = entry.job
        if self._touched[entry] and free.has(job.placement) and job.may_have(job.placement):
            entry.devices = entry.job.placement
        else:
            devices = choose_devices(self.placement, job, free)
            if devices is None and (devices := self._make_room(entry)) is None:
                return False
            entry.devices = devices
        free.take(entry.devices)
        return True

    def _make_room(self, entry: E) -> tuple[int, ...] | None:
        """Suspend less urgent jobs if ``entry`` can then be placed. Return its devices, or None."""
        if not self.preemptive:
            return None
        behind = [other for other in self.ranking.behind(entry) if other.devices]
        if entry.job.stays_on is not None:
            behind = self._last_on(entry.job.stays_on, behind, entry.size)
        trial = self._free.copy()
        for other in behind:
            trial.give(other.devices)
        devices = choose_devices(self.placement, entry.job, trial)
        if devices is None:
            return None
        wanted = set(devices)
        self._made_room = True
        for other in behind:
            if not wanted.isdisjoint(other.devices):
                self._touched.setdefault(other, True)
                self.ranking.withdraw(other)
                self._vacate(other)
        return devices

    def _last_on(self, node: int, behind: list[E], size: int) -> list[E]:
        """Return the least urgent of ``behind`` that leave ``size`` devices of ``node`` free together."""
        node_of, there = self._free.cluster.node_of, len(self._free.on_node[node])
        found: list[E] = []
        for other in reversed(behind):
            count = sum(node_of[device] == node for device in other.devices)
            if there < size and count:
                there += count
                found.append(other)
        return found

    def _vacate(self, entry: E) -> None:
        self._free.give(entry.devices)
        entry.devices = ()

    def _differences(self, view: View) -> list[Decision]:
        decisions: list[Decision] = []
        started: list[E] = []
        suspended: list[E] = []
        for entry, ran in self._touched.items():
            job = entry.job
            if not entry.running:
                if ran:
                    decisions.append(Suspend(job.id))
                    suspended.append(entry)
            elif not ran:
                decisions.append(Start(job.id, entry.devices))
                self.placement.placed(job, entry.devices)
                started.append(entry)
            elif entry.devices != job.placement:
                decisions.append(Migrate(job.id, entry.devices))
                self.placement.placed(job, entry.devices)
        started.sort(key=_by_key)
        suspended.sort(key=_by_key)
        self.settled(started, suspended, view)
        return decisions


def _by_key(entry: Entry) -> Key:
    return entry.key
