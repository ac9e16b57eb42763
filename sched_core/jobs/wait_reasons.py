"""Why jobs wait, split as the Philly study does (Jeon et al., ATC 2019), live and simulated.

Fair-share delay: the tenant has used up its share, which is a quota or a share that the policy keeps to.
Fragmentation delay: the tenant has not, and as many devices as the job asks for are free, but not where the
policy wants them. The rest of the waiting is other jobs' turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from gpuslice.sched_core.job import JobSpec

#: Returns True if a tenant that asks for so many devices more has used up its share.
OverShare = Callable[[str, int], bool]


@dataclass(frozen=True)
class Delays:
    """The seconds that a job has waited, by reason."""

    fair_share_s: float
    fragmentation_s: float


@dataclass(frozen=True, slots=True)
class Since:
    """The beginning of a job's wait: when, what its stopwatches showed, and if a quota caused it.

    ``fragmentation_s`` is None for a job that is not started yet: it could not use what is free.
    """

    at_s: float
    fair_share_s: float
    fragmentation_s: float | None
    quota: bool


class Waiter(Protocol):
    """A job that may wait, and how long it waited for which reason before it last ran."""

    spec: JobSpec
    demand: int
    waits_since: Since | None
    fair_share_s: float
    fragmentation_s: float


class Stopwatch:
    """A stopwatch that is started and stopped again and again.

    Nothing is added up while it runs, so that a replayed journal gives the same sums to the last bit.
    """

    __slots__ = ("_shown_s", "_since_s")

    def __init__(self) -> None:
        self._shown_s = 0.0
        self._since_s: float | None = None

    def run(self, now: float, *, on: bool) -> None:
        """Start the stopwatch if ``on``, else stop it. Change nothing if it is so already."""
        if on and self._since_s is None:
            self._since_s = now
        elif not on and self._since_s is not None:
            self._shown_s += now - self._since_s
            self._since_s = None

    @property
    def runs(self) -> bool:
        """True if the stopwatch runs now."""
        return self._since_s is not None

    def at(self, now: float) -> float:
        """Return the seconds that the stopwatch shows at ``now``."""
        return self._shown_s if self._since_s is None else self._shown_s + (now - self._since_s)


class Waits:
    """The stopwatches that run while jobs wait.

    All jobs of one size (and of one tenant, where shares matter) have two stopwatches in common, one for each
    delay. A job only remembers what they showed.

    Parameters
    ----------
    free
        Returns how many devices are free now.
    over_share
        Returns True if a tenant has used up its share. None: only quotas count.
    """

    def __init__(self, free: Callable[[], int], over_share: OverShare | None = None) -> None:
        self._free = free
        self._over_share = over_share
        #: The fair-share and the fragmentation stopwatch, by tenant ("" where shares do not matter) and size.
        self._stopwatches: dict[tuple[str, int], tuple[Stopwatch, Stopwatch]] = {}

    def change(self, over_share: OverShare | None, jobs: Iterable[Waiter], now: float) -> None:
        """Ask another policy from now on who is over its share. ``jobs`` are all that may wait."""
        waiting = [(job, since) for job in jobs if (since := job.waits_since) is not None]
        for job, _ in waiting:
            self.end(job, now)
        self._over_share = over_share
        self._stopwatches.clear()
        for job, since in waiting:
            self.begin(job, now, quota=since.quota, unstarted=since.fragmentation_s is None)

    def update(self, now: float) -> None:
        """Start and stop the stopwatches. To be called after every change of what is free."""
        free, over_share = self._free(), self._over_share
        for (tenant, size), (fair, fragmented) in self._stopwatches.items():
            over = over_share is not None and over_share(tenant, size)
            fair.run(now, on=over)
            fragmented.run(now, on=free >= size and not over)

    def begin(self, job: Waiter, now: float, *, quota: bool = False, unstarted: bool = False) -> None:
        """Note that ``job`` waits from now on.

        ``quota`` is True if it waits for its tenant's quota, ``unstarted`` if its command has yet to be
        started.
        """
        self.end(job, now)
        fair, fragmented = self._of(job)
        job.waits_since = Since(now, fair.at(now), None if unstarted else fragmented.at(now), quota)

    def end(self, job: Waiter, now: float) -> None:
        """Note that ``job`` does not wait any more, and add up its delays. Do nothing if it did not wait."""
        if job.waits_since is None:
            return
        delays = self.delays(job, now)
        job.waits_since = None
        job.fair_share_s, job.fragmentation_s = delays.fair_share_s, delays.fragmentation_s

    def delays(self, job: Waiter, now: float) -> Delays:
        """Return the seconds that ``job`` has waited up to ``now``, by reason."""
        fair_s = fragmented_s = 0.0
        since = job.waits_since
        if since is not None:
            if since.quota:
                fair_s = now - since.at_s
            else:
                fair, fragmented = self._of(job)
                fair_s = fair.at(now) - since.fair_share_s
                if since.fragmentation_s is not None:
                    fragmented_s = fragmented.at(now) - since.fragmentation_s
        return Delays(job.fair_share_s + fair_s, job.fragmentation_s + fragmented_s)

    def is_over_share(self, job: Waiter) -> bool:
        """Return True if ``job`` waits because its tenant has used up the share that the policy gives it."""
        return job.waits_since is not None and not job.waits_since.quota and self._of(job)[0].runs

    def _of(self, job: Waiter) -> tuple[Stopwatch, Stopwatch]:
        """Return the two stopwatches of ``job``. New ones stay at 0 until the next `update`."""
        key = ("" if self._over_share is None else job.spec.tenant, job.demand)
        if key not in self._stopwatches:
            self._stopwatches[key] = (Stopwatch(), Stopwatch())
        return self._stopwatches[key]
