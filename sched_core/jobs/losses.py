"""The losses that live jobs report."""

from __future__ import annotations

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.jobs.gang import Gang


class ReportedLosses:
    """``knowledge.Losses`` of a live scheduler: of each job, the newest of the first rank that has any."""

    def loss(self, job: Job, now_s: float) -> float | None:
        """The newest loss of ``job``, or ``None`` if it reports none."""
        if not isinstance(job, Gang):
            return None
        return next((rank.loss for rank in job.ranks if rank.loss is not None), None)
