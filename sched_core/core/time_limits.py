"""Time limits of jobs: how long a job may be on its devices, all of its attempts together.

Time in which its ranks are on its devices counts, whether it trains or sets up. Waiting, parked and switching
time does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from gpuslice.sched_core.jobs.failures import Kind
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import Trigger
from gpuslice.sched_core.lifecycle.job_steps import end
from gpuslice.sched_core.lifecycle.state import State

_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))


class TimeLimits:
    """The part of ``Core`` that ends jobs at their time limits.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def expire(self, now: float) -> None:
        """End the jobs that have been on their devices for as long as they may."""
        for job in {job.id: job for job in self._limited()}.values():
            if _ends_s(job) <= now:
                reason = f"it was on its devices for {_written(job.spec.time_limit_s)} (--time-limit)"
                end(self._state, job, Trigger.FAIL, reason, now, Kind.TIME_LIMIT)

    def due_s(self) -> float:
        """Return when the next job will reach its limit; infinite if none will."""
        return min(map(_ends_s, self._limited()), default=inf)

    def _limited(self) -> Iterator[Gang]:
        for occupants in self._state.occupants:
            for job in occupants.values():
                if job.spec.time_limit_s and not job.told_to_end:
                    yield job


def _ends_s(job: Gang) -> float:
    return job.has_had_devices_s(job.spec.time_limit_s)


def _written(seconds: float) -> str:
    """Return a time limit in its largest unit: ``6 h``, ``1.5 h``, ``90 s``."""
    for unit, size_s in _UNITS:
        if seconds >= size_s and (2.0 * seconds / size_s).is_integer():
            return f"{seconds / size_s:g} {unit}"
    return f"{seconds:g} s"
