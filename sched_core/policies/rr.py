"""Round robin: everybody in turn, a quantum at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import floor

from gpuslice.errors import ConfigError
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policy import View

from .ranked import RankedPolicy
from .ranking import Entry, Key

#: Shares add up to whole slices but for rounding.
_TINY = 1e-6


class Turn(Entry):
    """A job in the line, with the slices that are left to it in this turn.

    Attributes
    ----------
    weight
        The job's, as it was counted.
    slices
        What is left of its turn.
    """

    __slots__ = ("slices", "weight")

    def __init__(self, job: Job, kind: str) -> None:
        super().__init__(job, kind)
        self.weight = job.spec.weight
        self.slices = 0.0


class RoundRobin(RankedPolicy[Turn]):
    """Round robin: all slices end together, and jobs that ran go to the end of the line.

    Because nobody's slice ends alone, a gang that needs many devices finds them free when its turn has come.
    A new job joins the end of the line and thus waits for one round at most; nobody is suspended within
    a slice. Who has not trained in a slice, being set up or brought back all the while, keeps its place in
    the line. A job gets as many slices in a row as its weight is that of the lightest; fractions are saved.

    Parameters
    ----------
    quantum_s
        Length of a slice, in seconds. Where switching is so expensive that it would take more than its share
        of the time, a slice is the least multiple of this that is long enough.
    """

    name = "rr"
    entry_type = Turn
    sparing = False

    def __init__(self, placement: Placement | None = None, *, quantum_s: float = 60.0) -> None:
        super().__init__(placement)
        if not quantum_s > 0:
            raise ConfigError(
                f"quantum_s={quantum_s} is not a time", "give the slice a positive number of seconds"
            )
        self.quantum_s = quantum_s
        self._turn = 0
        self._round_ends_s: float | None = None
        #: How many jobs have each weight.
        self._weights: Counter[float] = Counter()

    def _rebuild(self, view: View) -> None:
        left = {name: entry.slices for name, entry in self._entries.items()}
        self._weights.clear()
        super()._rebuild(view)
        for entry in self._entries.values():
            entry.slices = left.get(entry.job.id, 0.0)
            if entry.running and entry.slices < 1.0 - _TINY:
                entry.slices += self._share(entry)

    def reset_order(self, jobs: Iterable[Job]) -> Iterable[Job]:
        return sorted(jobs, key=lambda job: (not job.running, job.since_s))

    def admitted(self, entry: Turn, view: View) -> None:
        self._weights[entry.weight] += 1

    def left(self, entry: Turn) -> None:
        self._weights[entry.weight] -= 1
        if not self._weights[entry.weight]:
            del self._weights[entry.weight]

    def waiting_key(self, entry: Turn, view: View) -> Key:
        self._turn += 1
        return (1, self._turn)

    def running_key(self, entry: Turn, view: View) -> Key:
        self._turn += 1
        return (0, self._turn)

    def _share(self, entry: Turn) -> float:
        """Return the number of slices that ``entry`` has in a turn."""
        return entry.weight / min(self._weights)

    def update(self, view: View) -> None:
        if self._round_ends_s is not None and view.now_s >= self._round_ends_s:
            self._round_ends_s = None
            for _, entry in list(self.ranking.running):
                entry.slices -= 1.0 if entry.job.since_s < view.now_s else 0.0
                # With slices left it keeps its place in the line: behind those that were passed over.
                stays = entry.slices > 1.0 - _TINY
                self.ranking.rekey(entry, (1, entry.key[1]) if stays else self.waiting_key(entry, view))

    def settled(self, started: Sequence[Turn], suspended: Sequence[Turn], view: View) -> None:
        for key, entry in list(self.ranking.running):
            if key[0] == 1:
                self.ranking.rekey(entry, (0, key[1]))
                if entry.slices < 1.0 - _TINY:
                    entry.slices += self._share(entry)

    def wake_at(self, view: View) -> float | None:
        if self._round_ends_s is None and self.crowded:
            slice_s = view.slice_s(self.quantum_s)
            slices = floor(view.now_s / slice_s) + 1
            while slices * slice_s <= view.now_s:
                slices += 1
            self._round_ends_s = slices * slice_s
        return self._round_ends_s
