"""What jobs in a simulation show of their speed: that of the devices that they have."""

from __future__ import annotations

from collections.abc import Mapping

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.knowledge import NoThroughput


class PresentSpeeds(NoThroughput):
    """The speeds of jobs on their present devices. A policy remembers those on former numbers itself."""

    def speeds(self, job: Job) -> Mapping[int, float]:
        return {len(job.placement): job.rate} if job.running else {}
