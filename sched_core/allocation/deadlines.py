"""Deadlines of jobs under any policy, and notices of those that were missed."""

from __future__ import annotations

import heapq
from math import inf

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Notice
from gpuslice.sched_core.lifecycle.state import State


class Deadlines:
    """The deadlines that jobs can still miss.

    Parameters
    ----------
    state
        The facts that all parts of the core share. Notices of missed deadlines are ordered there.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._coming: list[tuple[float, int, Gang]] = []

    def add(self, job: Gang) -> None:
        """Watch the deadline of ``job``, which has been submitted, if it has one."""
        if job.spec.due_s < inf:
            heapq.heappush(self._coming, (job.spec.due_s, job.number, job))

    def due_s(self) -> float:
        """Return the time of the next deadline that can still be missed; infinite if there is none."""
        while self._coming and _over(self._coming[0][2]):
            heapq.heappop(self._coming)
        return self._coming[0][0] if self._coming else inf

    def report_missed(self, now: float) -> None:
        """Report every job whose deadline has passed by ``now`` and that has not succeeded."""
        while self.due_s() <= now:
            self.judge(heapq.heappop(self._coming)[2], now)

    def judge(self, job: Gang, now: float) -> None:
        """Report, once, that ``job`` has missed its deadline, if it has. A refused guarantee is no miss."""
        if job.deadline_missed or now < job.spec.due_s:
            return
        if job.spec.guaranteed and job.guaranteed is False and job.state is JobState.CANCELLED:
            return  # it was refused
        job.deadline_missed = True
        details = {"deadline_s": job.spec.last_deadline_s, "guaranteed": job.guaranteed}
        self._state.order(Notice("deadline_missed", job.id, details))


def _over(job: Gang) -> bool:
    return job.deadline_missed or job.state in (JobState.SUCCEEDED, JobState.CANCELLED)
