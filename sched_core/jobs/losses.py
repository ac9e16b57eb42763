"""The losses that live jobs report."""

from __future__ import annotations

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.jobs.gang import Gang


class ReportedLosses:
    """The training losses that the ranks of live jobs report (``knowledge.Losses``)."""

    def loss(self, job: Job, now_s: float) -> float | None:
        """Return the newest loss of the first rank of ``job`` that reports any. Return None if none does."""
        if not isinstance(job, Gang):
            return None
        return next((rank.loss for rank in job.ranks if rank.loss is not None), None)
