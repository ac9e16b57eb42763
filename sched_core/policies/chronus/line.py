"""Who waits for what guaranteed jobs leave, sorted from event to event."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace

from gpuslice.sched_core.job import Job

#: Whether it is guaranteed a lease anyway, work × devices, number: smaller is more urgent.
Key = tuple[bool, float, int]


class Line:
    """The waiting jobs, sorted by key for each demand: of equal demand only the first can start next."""

    def __init__(self) -> None:
        self._by_demand: dict[int, list[tuple[Key, Job]]] = {}
        self._keys: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, job: Job) -> bool:
        return job.id in self._keys

    def add(self, job: Job, key: Key) -> None:
        """Insert ``job`` with this key, or change its key if it waits already."""
        self.remove(job)
        self._keys[job.id] = key
        insort(self._by_demand.setdefault(job.demand, []), (key, job))

    def remove(self, job: Job) -> None:
        """Remove ``job`` if it waits."""
        key = self._keys.pop(job.id, None)
        if key is not None:
            line = self._by_demand[job.demand]
            del line[bisect_left(line, (key,))]

    def shortest(self, room: int, others: Iterable[tuple[Key, Job]] = ()) -> list[Job]:
        """Return the first jobs by key that fit into ``room`` devices one after the other.

        ``others`` wait, too.
        """
        further: dict[int, list[tuple[Key, Job]]] = {}
        for other in sorted(others):
            further.setdefault(other[1].demand, []).append(other)
        lines = [*self._by_demand.values(), *further.values()]
        heads = [(*line[0], 0, line) for line in lines if line and line[0][1].demand <= room]
        heapify(heads)
        chosen: list[Job] = []
        while heads:
            _, job, place, line = heads[0]
            if job.demand > room:
                heappop(heads)  # what is left never grows
                continue
            chosen.append(job)
            room -= job.demand
            if place + 1 < len(line):
                heapreplace(heads, (*line[place + 1], place + 1, line))
            else:
                heappop(heads)
        return chosen
