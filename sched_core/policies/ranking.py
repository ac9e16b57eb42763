"""Greedy admission by priority, kept up to date at a cost that does not grow with the jobs that wait.

The rule: walk all jobs by key, smallest first, and let run whoever still fits. Walking costs as much as
there are jobs; ``Ranking`` finds only the decisions that differ from the last time. Two facts make that
cheap. What is left at a position never grows along the walk, so of all waiting jobs of one size only the
first can be the next to start. And a job that waits was passed over because less than its size was left,
so fewer devices than its size are held behind it: what is left there is found by walking a few running jobs
from the end of the list.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Set
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from gpuslice.sched_core.job import Job

#: Any tuple that no two jobs share; smaller is more urgent.
Key = tuple[Any, ...]
#: Jobs of one class fit or do not fit alike: demand, and the placement's kind.
SizeClass = tuple[int, str]


class Entry:
    """A job in the ranking.

    Attributes
    ----------
    key
        Its priority.
    running
        True if the ranking lets it run.
    devices
        The devices on which the entry should run, if it runs.
    """

    __slots__ = ("devices", "job", "key", "running", "size", "size_class")

    def __init__(self, job: Job, kind: str) -> None:
        self.job = job
        self.size = job.demand
        self.size_class: SizeClass = (job.demand, kind)
        self.key: Key = ()
        self.running = False
        self.devices: tuple[int, ...] = ()


E = TypeVar("E", bound=Entry)


class Ranking(Generic[E]):
    """Waiting and running jobs by priority.

    Parameters
    ----------
    capacity
        Number of devices.
    strict
        The first waiting job that does not fit blocks all behind it, instead of being passed over.
    kind
        The placement's kind of a job, asked whenever it begins to wait: it may change while a job runs.
    """

    def __init__(
        self, capacity: int, *, strict: bool = False, kind: Callable[[Job], str] | None = None
    ) -> None:
        self._kind = kind
        self.free = capacity
        self.running: list[tuple[Key, E]] = []
        self._strict = strict
        #: One heap per class of (key, count, entry); stale unless the entry waits with exactly that key.
        self._waiting: dict[SizeClass, list[tuple[Key, int, E]]] = {}
        self._pushed = 0
        #: How running entries get keys of the present, and which ones (``expire``); ``None``: they have them.
        self._expired: tuple[Callable[[E], Key], Key | None] | None = None
        #: Those that got their keys since.
        self._young: set[E] = set()

    def add(self, entry: E, key: Key) -> None:
        """Insert an entry, new or removed before, with its key. A running entry keeps running."""
        entry.key = key
        if entry.running:
            insort(self.running, (key, entry))
            self.free -= entry.size
            if self._expired is not None:
                self._young.add(entry)
        else:
            if self._kind is not None:
                entry.size_class = (entry.size, self._kind(entry.job))
            self._pushed += 1  # Stale items may have the key of another entry; entries do not compare.
            heappush(self._waiting.setdefault(entry.size_class, []), (key, self._pushed, entry))

    def remove(self, entry: E) -> None:
        """Remove ``entry``."""
        if entry.running:
            self._pull(entry)
        entry.key = ()

    def rekey(self, entry: E, key: Key) -> None:
        """Change the key of ``entry``."""
        self.remove(entry)
        self.add(entry, key)

    def rekey_running(self, key: Callable[[int, E], Key]) -> None:
        """Give every running entry a new key.

        ``key`` is called with the entry and its position.
        """
        for position, (_, entry) in enumerate(self.running):
            entry.key = key(position, entry)
        self.running = sorted((entry.key, entry) for _, entry in self.running)

    def expire(self, key: Callable[[E], Key], before: Key | None = None) -> None:
        """Mark running entries' keys as outdated: `refresh` computes new ones with ``key`` when needed.

        ``key`` computes a new one when the order matters.

        Parameters
        ----------
        before
            Only entries with smaller keys than this one, which keep smaller keys; all if not given.
        """
        self._expired = (key, before)
        self._young.clear()

    def behind(self, entry: E) -> list[E]:
        """Return the running entries that are less urgent than ``entry``, most urgent first."""
        self.refresh()
        return [other for _, other in self.running[bisect_right(self.running, (entry.key, entry)) :]]

    def withdraw(self, entry: E) -> None:
        """Make a running entry wait, with the same key."""
        self._pull(entry)
        entry.running = False
        self.add(entry, entry.key)

    def repair(self, blocked: Set[SizeClass] = frozenset(), passed: Set[SizeClass] = frozenset()) -> list[E]:
        """Run exactly the entries that the greedy walk admits. Return those that changed, in walk order.

        Parameters
        ----------
        blocked, passed
            Classes that cannot be placed at present: none of them is started. If the ranking is ``strict``,
            those in ``blocked`` also keep all others from starting.
        """
        flipped: list[E] = []
        while True:
            start = self._next_start(blocked, passed)
            if self.free < 0:
                crowded = self._first_crowded()
                if start is None or crowded.key < start.key:
                    self.withdraw(crowded)
                    flipped.append(crowded)
                    continue
            if start is None:
                return flipped
            heappop(self._waiting[start.size_class])
            start.running = True
            self.add(start, start.key)
            flipped.append(start)

    def _pull(self, entry: E) -> None:
        del self.running[bisect_left(self.running, (entry.key,))]
        self.free += entry.size

    def _next_start(self, blocked: Set[SizeClass], passed: Set[SizeClass]) -> E | None:
        """Return the most urgent waiting entry that fits behind everything more urgent."""
        if blocked and self._strict:
            return None
        best: E | None = None
        empty: list[SizeClass] = []
        for size_class, heap in self._waiting.items():
            while heap and (heap[0][2].running or heap[0][2].key is not heap[0][0]):
                heappop(heap)
            if not heap:
                empty.append(size_class)
            if not heap or size_class in blocked or size_class in passed:
                continue
            head = heap[0][2]
            if best is not None and best.key < head.key:
                continue
            if self._strict or head.size <= self.free or self._fits(head):
                best = head
        for size_class in empty:
            del self._waiting[size_class]
        if best is not None and self._strict and not self._fits(best):
            return None
        return best

    def _fits(self, entry: E) -> bool:
        """Return True if ``entry`` fits once everything less urgent gives way."""
        left, size, key = self.free, entry.size, entry.key
        if left >= size:
            return True
        for behind_key, behind in reversed(self.running) if self._expired is None else self._backwards():
            if behind_key < key:
                return False
            left += behind.size
            if left >= size:
                return True
        return False

    def _first_crowded(self) -> E:
        """Return the most urgent running entry that does not fit any more."""
        left = self.free
        for _, crowded in self._backwards():
            left += crowded.size
            if left >= 0:
                return crowded
        raise AssertionError("more devices are taken than all that run have")

    def _backwards(self) -> Iterator[tuple[Key, E]]:
        """Yield the running entries, least urgent first, computing up-to-date keys on the way."""
        for position in range(len(self.running) - 1, -1, -1):
            item = self.running[position]
            if self._expired is not None and (self._expired[1] is None or item[0] < self._expired[1]):
                self.refresh()
                item = self.running[position]
            yield item

    def refresh(self) -> None:
        """Compute up-to-date keys of the running entries (see `expire`)."""
        if self._expired is None:
            return
        key, before = self._expired
        self._expired = None
        running, young = self.running, self._young
        end = len(running) if before is None else bisect_left(running, (before,))
        changed: list[tuple[Key, E]] = []
        for _, entry in running[:end]:
            if entry not in young:
                entry.key = key(entry)
            changed.append((entry.key, entry))
        changed.sort()
        running[:end] = changed
