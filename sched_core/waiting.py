"""Why jobs wait, split as the Philly study does (Jeon et al., ATC 2019).

Fair-share delay: the tenant's quota is used up. Fragmentation delay: as many devices as the job asks for are
free, but not where the policy wants them. The rest of the waiting is other jobs' turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .gang import Gang


@dataclass(frozen=True)
class Delays:
    """How long a job has waited, in seconds, together and for which reason."""

    waited_s: float
    fair_share_s: float
    fragmentation_s: float


class Waits:
    """Clocks that run while a job waits.

    For each size there is one clock for all jobs, which runs while so many devices are free; a job only
    remembers where it stood.

    Parameters
    ----------
    free
        How many devices are free now.
    """

    def __init__(self, free: Callable[[], int]) -> None:
        self._free = free
        #: By size: what the clock showed when it stopped last, and since when it runs, if it does. Nothing is
        #: added up in between, so that a replayed journal gives the same sums to the last bit.
        self._clocks: dict[int, tuple[float, float | None]] = {}

    def update(self, now: float) -> None:
        """Start and stop the clocks; to be called after whatever changed what is free."""
        free = self._free()
        for size, (shown_s, since_s) in self._clocks.items():
            if since_s is None and free >= size:
                self._clocks[size] = (shown_s, now)
            elif since_s is not None and free < size:
                self._clocks[size] = (shown_s + (now - since_s), None)

    def begin(self, job: Gang, now: float, *, quota: bool = False, unstarted: bool = False) -> None:
        """``job`` waits from now on, perhaps for its tenant's quota, or to be started."""
        self.end(job, now)
        self._clocks.setdefault(job.demand, (0.0, None))
        job.waits_since = (now, None if unstarted else self._clock_s(job.demand, now), quota)

    def end(self, job: Gang, now: float) -> None:
        """``job`` does not wait any more, if it did."""
        delays = self.delays(job, now)
        job.waits_since = None
        job.waited_s, job.fair_share_s = delays.waited_s, delays.fair_share_s
        job.fragmentation_s = delays.fragmentation_s

    def delays(self, job: Gang, now: float) -> Delays:
        """How long ``job`` has waited up to ``now``."""
        waited_s = fair_s = fragmented_s = 0.0
        if job.waits_since is not None:
            since_s, clock_s, quota = job.waits_since
            waited_s = now - since_s
            if quota:
                fair_s = waited_s
            elif clock_s is not None:  # else it could not have used what was free
                fragmented_s = self._clock_s(job.demand, now) - clock_s
        return Delays(job.waited_s + waited_s, job.fair_share_s + fair_s, job.fragmentation_s + fragmented_s)

    def _clock_s(self, size: int, now: float) -> float:
        shown_s, since_s = self._clocks[size]
        return shown_s if since_s is None else shown_s + (now - since_s)
