"""Policies as the simulator published with Tiresias computes them, mistakes included; see docs/simulate.md.

They exist to be compared with; the policies proper are in the other files.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf

from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policies.ranking import Key
from gpuslice.sched_core.policies.tiresias.gittins import PublishedIndex, yarn_services
from gpuslice.sched_core.policies.tiresias.mlfq import Mlfq, MlfqEntry
from gpuslice.sched_core.policy import View


class PublishedDlas(Mlfq):
    """Three queues; within a queue running jobs come before waiting ones, otherwise the order of joining it.

    Parameters
    ----------
    by_devices
        Service is GPU time (``dlas-gpu``), not time (``dlas``).
    promote
        Factor in the name: ``dlas-gpu-2`` promotes after waiting twice the executed time, summed over all
        waits since the last promotion.
    """

    name = "published-dlas"

    def __init__(
        self, placement: Placement | None = None, *, by_devices: bool = True, promote: float = inf
    ) -> None:
        super().__init__(placement, thresholds=(3250.0, 7200.0), promote=promote, by_devices=by_devices)
        self._sequence = count(1)
        #: Running entries that joined the end of another queue in this plan.
        self._sunk: list[MlfqEntry] = []
        #: Promotions to come, as in the heap of the base: (due, number, how many before, entry).
        self._rises: list[tuple[float, int, int, MlfqEntry]] = []
        #: When each running job will have run for as long as its queue has device-seconds.
        self._spent_s: dict[MlfqEntry, float] = {}
        #: The same by divisor of the wake-up: (spent, number, how many before, entry); stale unless still in
        #: ``_spent_s``.
        self._spent: dict[int, list[tuple[float, int, int, MlfqEntry]]] = {}
        #: Entries in both so far: two of one job may be due at one moment.
        self._watched = count()

    def _rebuild(self, view: View) -> None:
        # What they hold are entries that are forgotten now; they are in no ranking any more.
        for forgotten in (self._sunk, self._rises, self._spent_s, self._spent):
            forgotten.clear()
        super()._rebuild(view)

    def admitted(self, entry: MlfqEntry, view: View) -> None:
        super().admitted(entry, view)
        if entry.running:
            self._watch(entry, view.now_s)

    def left(self, entry: MlfqEntry) -> None:
        super().left(entry)
        self._spent_s.pop(entry, None)

    def rank(self, entry: MlfqEntry, view: View) -> Key:
        """Return the first part of the key, before the order of joining the queue; empty for LAS."""
        return ()

    def waiting_key(self, entry: MlfqEntry, view: View) -> Key:
        return (entry.level, *self.rank(entry, view), 1, next(self._sequence))

    def requeued(self, entry: MlfqEntry, view: View) -> None:
        self.ranking.rekey(entry, self.waiting_key(entry, view))
        if entry.running:
            self._sunk.append(entry)

    def settled(self, started: Sequence[MlfqEntry], suspended: Sequence[MlfqEntry], view: View) -> None:
        super().settled(started, suspended, view)
        for entry in started:
            self._watch(entry, view.now_s)
        for entry in suspended:
            self._spent_s.pop(entry, None)
        joining = {*started, *(entry for entry in self._sunk if entry.running)}
        self._sunk.clear()
        for entry in sorted(joining, key=_by_key):
            self.ranking.rekey(entry, (*entry.key[:-2], 0, next(self._sequence)))
        for entry in reversed(suspended):
            if entry.key[-2] == 0:
                self.ranking.rekey(entry, (*entry.key[:-2], 1, -next(self._sequence)))

    def wake_at(self, view: View) -> float | None:
        """Return the published wake-up time: limit minus time (not GPU time), divided by devices.

        Too late for some demotions and too early for others, which matters because promotions are looked for
        only when something happens.
        """
        now_s, wake_s = view.now_s, inf
        # Of jobs that are divided alike, the first to be spent is the first to wake.
        for divisor, heap in self._spent.items():
            while heap and self._spent_s.get(heap[0][3]) != heap[0][0]:
                heappop(heap)
            if heap:
                wake_s = min(wake_s, now_s + (heap[0][0] - now_s) // divisor)
        return self._next_promotion(now_s, wake_s)

    def _watch(self, entry: MlfqEntry, now_s: float) -> None:
        """Note when ``entry``, which now runs or changed its queue, will wake the policy."""
        if entry.level == len(self.limits):
            self._spent_s.pop(entry, None)
            return
        executed_s = entry.job.executed_at(now_s) - entry.base_executed_s
        spent_s = now_s + self.limits[entry.level] - executed_s
        self._spent_s[entry] = spent_s
        divisor = entry.size if self.by_devices else 1
        heappush(self._spent.setdefault(divisor, []), (spent_s, entry.job.number, next(self._watched), entry))

    def _next_promotion(self, now_s: float, wake_s: float) -> float | None:
        # What is due already waits for the next event; the queue base has it in its own heap.
        rises = self._rises
        while rises and not (now_s < rises[0][0] == rises[0][3].due_s and not rises[0][3].running):
            heappop(rises)
        wake_s = min(wake_s, rises[0][0]) if rises else wake_s
        return None if wake_s == inf else wake_s

    def _expect(self, entry: MlfqEntry, due_s: float) -> None:
        super()._expect(entry, due_s)
        if due_s < inf and not entry.running:
            heappush(self._rises, (due_s, entry.job.number, next(self._watched), entry))

    def _demote(self, entry: MlfqEntry, view: View) -> None:
        entry.level += 1
        self._expect(entry, self._demotion_s(entry, view.now_s))
        self._watch(entry, view.now_s)
        self.requeued(entry, view)

    def _promotion_s(self, entry: MlfqEntry, now_s: float) -> float:
        executed_s = entry.job.executed_at(now_s) - entry.base_executed_s
        if entry.level == 0 or self.promote == inf or executed_s <= 0:
            return inf
        return now_s + int(executed_s * self.promote) - entry.waited_s


class PublishedGittins(PublishedDlas):
    """As ``dlas-gpu``, with every queue sorted by the published index, earlier submission first."""

    name = "published-gittins"

    def __init__(self, placement: Placement | None = None) -> None:
        super().__init__(placement)
        self.index = PublishedIndex(yarn_services())

    def rank(self, entry: MlfqEntry, view: View) -> Key:
        return (-self.index.at(self.attained(entry, view.now_s)), entry.job.spec.submit_s)

    def update(self, view: View) -> None:
        """Sort again after the indices of running jobs have changed. Ties keep the order of the last plan."""
        self.ranking.rekey_running(lambda place, entry: (entry.level, *self.rank(entry, view), 0, place))
        super().update(view)


def _by_key(entry: MlfqEntry) -> Key:
    return entry.key
