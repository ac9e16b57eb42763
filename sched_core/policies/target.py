"""From who shall hold which devices to the decisions that bring it about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policy import Decision, Migrate, Start, Suspend


def difference(jobs: Iterable[Job], target: Mapping[str, tuple[int, ...]]) -> list[Decision]:
    """Return decisions after which exactly the jobs in ``target`` run, on those devices."""
    decisions: list[Decision] = []
    for job in jobs:
        devices = target.get(job.id)
        if devices is None:
            if job.running:
                decisions.append(Suspend(job.id))
        elif not job.running:
            decisions.append(Start(job.id, devices))
        elif devices != job.placement:
            decisions.append(Migrate(job.id, devices))
    return decisions
