"""Deadlines, whoever the policy is: which jobs miss theirs."""

from __future__ import annotations

import heapq
from math import inf

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState

from .contract import CoreContract
from .events import Notice


class Deadlines:
    """The deadlines that are yet to come.

    Parameters
    ----------
    core
        Whose; it is asked to tell of those that were missed.
    """

    def __init__(self, core: CoreContract) -> None:
        self._core = core
        self._coming: list[tuple[float, int, Gang]] = []

    def add(self, job: Gang) -> None:
        """``job`` has been submitted."""
        if job.spec.due_s < inf:
            heapq.heappush(self._coming, (job.spec.due_s, job.number, job))

    def due_s(self) -> float:
        """When the next deadline is of a job that can still miss it; infinite if there is none."""
        while self._coming and _over(self._coming[0][2]):
            heapq.heappop(self._coming)
        return self._coming[0][0] if self._coming else inf

    def report_missed(self, now: float) -> None:
        """Report the jobs that have not ended well by now, and should have."""
        while self.due_s() <= now:
            self.judge(heapq.heappop(self._coming)[2], now)

    def judge(self, job: Gang, now: float) -> None:
        """See whether ``job``, which ends or runs on, has missed its deadline; that is reported once."""
        if job.deadline_missed or now < job.spec.due_s:
            return
        if job.spec.guaranteed and job.guaranteed is False and job.state is JobState.CANCELLED:
            return  # it was refused
        job.deadline_missed = True
        details = {"deadline_s": job.spec.last_deadline_s, "guaranteed": job.guaranteed}
        self._core.order(Notice("deadline_missed", job.id, details))


def _over(job: Gang) -> bool:
    return job.deadline_missed or job.state in (JobState.SUCCEEDED, JobState.CANCELLED)
