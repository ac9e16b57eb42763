"""Least attained service first, undiscretized: foreground-background scheduling in time slices."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.errors import ConfigError
from gpuslice.sched_core.placement.placement import Placement
from gpuslice.sched_core.policy import View

from .ranked import RankedPolicy
from .ranking import Entry, Key


class LeastAttained(RankedPolicy[Entry]):
    """Least attained service first. The order is updated at each event and every quantum.

    With an ever smaller quantum this becomes foreground-background: jobs of equal service share the devices.

    Parameters
    ----------
    quantum_s
        How long jobs run before they are compared again, in seconds; longer if switching is expensive.
    by_devices
        Service is devices times time; otherwise time alone.
    """

    name = "las"

    def __init__(
        self, placement: Placement | None = None, *, quantum_s: float = 60.0, by_devices: bool = True
    ) -> None:
        super().__init__(placement)
        if not quantum_s > 0:
            raise ConfigError(f"quantum_s={quantum_s} is not a time", "give a positive number of seconds")
        self.quantum_s = quantum_s
        self.by_devices = by_devices
        self._compare_s: float | None = None

    def waiting_key(self, entry: Entry, view: View) -> Key:
        job, now_s = entry.job, view.now_s
        attained = job.service_at(now_s) if self.by_devices else job.executed_at(now_s)
        return (attained, job.number)

    def has_trained(self, entry: Entry, view: View) -> None:
        self.ranking.rekey(entry, self.waiting_key(entry, view))

    def update(self, view: View) -> None:
        if self._compare_s is not None and view.now_s >= self._compare_s:
            self._compare_s = None
        if self.contended:
            self.ranking.expire(lambda entry: self.waiting_key(entry, view))

    def settled(self, started: Sequence[Entry], suspended: Sequence[Entry], view: View) -> None:
        for entry in suspended:
            self.ranking.rekey(entry, self.waiting_key(entry, view))

    def wake_at(self, view: View) -> float | None:
        if not self.crowded:
            self._compare_s = None
        elif self._compare_s is None:
            self._compare_s = view.now_s + view.slice_s(self.quantum_s)
        return self._compare_s
