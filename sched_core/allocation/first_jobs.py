"""Arrays start with one job, which shows what memory the jobs of the array need. Then the others follow.

Jobs of an array have one command, so what the first one needs is what all need. Without that, all of them
would be given devices, or be packed, before anybody knows whether they fit. A job has shown its need when its
peak was measured. The others also follow when it cannot be expected to show any: it trains and nothing is
measured here, it has ended or failed, or it has taken its time. A job that its owner holds, or that cannot
have devices, is no first one: the next one is.
"""

from __future__ import annotations

from math import inf

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Notice, Plain
from gpuslice.sched_core.lifecycle.state import State

from .quotas import Quotas

#: The longest that the others wait while the first one starts, and while it is on its devices.
PATIENCE_S = 60.0
#: Steps after which nothing is measured any more if nothing was: ranks measure after the third.
_SHOWN_STEPS = 5


class FirstJobs:
    """The arrays of which only one job may have devices for now.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    quotas
        The limits of arrays: 1 until the need is known.
    """

    def __init__(self, state: State, quotas: Quotas) -> None:
        self._state, self._quotas = state, quotas

    def look_at(self, job: Gang, now: float) -> None:
        """Let the other jobs of its array follow ``job``, if that is due. Note what an array's job needs."""
        array = job.spec.array
        if not array:
            return
        if array in self._quotas.first and (why := _reason(job)):
            self._open(job, why)
        elif job.peak_bytes > self._quotas.array_bytes.get(array, 0) and array not in self._quotas.first:
            self._quotas.array_bytes[array] = job.peak_bytes

    def expire(self, now: float) -> None:
        """Let others follow the first jobs that have taken their time."""
        for job in self._jobs():
            if _patient_until_s(job) <= now:
                self._open(job, f"it has shown nothing within {PATIENCE_S:g} s")

    def due_s(self) -> float:
        """Return when the next first job will have taken its time; infinite if none will."""
        return min(map(_patient_until_s, self._jobs()), default=inf)

    def _jobs(self) -> list[Gang]:
        """Return the present first jobs."""
        limits = list(self._quotas.first.values())
        return [self._state.jobs[name] for limit in limits for name in limit.inside]

    def _open(self, job: Gang, why: str) -> None:
        """Let the other jobs of the array of ``job`` have devices."""
        array = job.spec.array
        for other in self._quotas.open(array, job.peak_bytes):
            self._state.reconcile_later(other)  # it may be shown or started now
        # The notice keeps the event in the journal, which leaves out heartbeats from which nothing follows.
        details: dict[str, Plain] = {"array": array, "peak_bytes": job.peak_bytes, "reason": why}
        self._state.order(Notice("array_starts", job.id, details))


def _reason(job: Gang) -> str:
    """Return why the others need not wait for ``job`` any more. Return an empty text if they do."""
    if job.peak_bytes:
        return "its need is known"
    if job.state in (JobState.SUCCEEDED, JobState.FAILED):
        return "it has ended"
    if job.failures:
        return "it has failed"
    return "it trains, and its memory is not measured" if job.steps >= _SHOWN_STEPS else ""


def _patient_until_s(job: Gang) -> float:
    """Return until when the others wait for ``job``. Infinite while it waits itself."""
    if job.lease:
        return job.has_had_devices_s(PATIENCE_S)
    starting = job.command.launched and bool(job.present(RankPhase.ABSENT))
    return job.command.launched_s + PATIENCE_S if starting else inf
