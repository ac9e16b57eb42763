"""Round robin: everybody in turn, a quantum at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from gpuslice.errors import ConfigError
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policy import View

from .ranked import RankedPolicy
from .ranking import Entry, Key


class RoundRobin(RankedPolicy[Entry]):
    """All slices end together, at multiples of the quantum; then those that ran go to the end of the line.

    Because nobody's slice ends alone, a gang that needs many devices finds them free when its turn has come.
    A new job joins the end of the line and thus waits for one round at most; nobody is suspended within
    a slice.

    Parameters
    ----------
    quantum_s
        Length of a slice, in seconds.
    """

    name = "rr"

    def __init__(self, placement: Placement | None = None, *, quantum_s: float = 60.0) -> None:
        super().__init__(placement)
        if not quantum_s > 0:
            raise ConfigError(
                f"quantum_s={quantum_s} is not a time", "give the slice a positive number of seconds"
            )
        self._quantum_s = quantum_s
        self._turn = 0
        self._round_ends_s: float | None = None

    def waiting_key(self, entry: Entry, view: View) -> Key:
        self._turn += 1
        return (1, self._turn)

    def running_key(self, entry: Entry, view: View) -> Key:
        self._turn += 1
        return (0, self._turn)

    def update(self, view: View) -> None:
        if self._round_ends_s is not None and view.now_s >= self._round_ends_s:
            self._round_ends_s = None
            for _, entry in list(self.ranking.running):
                self.ranking.rekey(entry, self.waiting_key(entry, view))

    def settled(self, started: Sequence[Entry], suspended: Sequence[Entry], view: View) -> None:
        for key, entry in list(self.ranking.running):
            if key[0] == 1:
                self.ranking.rekey(entry, (0, key[1]))

    def wake_at(self, view: View) -> float | None:
        if self._round_ends_s is None and self.crowded:
            quanta = floor(view.now_s / self._quantum_s) + 1
            while quanta * self._quantum_s <= view.now_s:
                quanta += 1
            self._round_ends_s = quanta * self._quantum_s
        return self._round_ends_s
