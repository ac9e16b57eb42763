"""From who shall hold which devices to the decisions that bring it about."""

from __future__ import annotations

from collections.abc import Mapping

from gpuslice.sched_core.policy import Decision, Migrate, Start, Suspend, View


def difference(view: View, target: Mapping[str, tuple[int, ...]]) -> list[Decision]:
    """Decisions after which exactly the jobs of ``target`` run, on those devices; in order of arrival."""
    decisions: list[Decision] = []
    for job in view.jobs.values():
        devices = target.get(job.id)
        if devices is None:
            if job.running:
                decisions.append(Suspend(job.id))
        elif not job.running:
            decisions.append(Start(job.id, devices))
        elif devices != job.placement:
            decisions.append(Migrate(job.id, devices))
    return decisions
