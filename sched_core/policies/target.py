"""From who shall hold how much, to which devices, to the decisions that bring it about."""

from __future__ import annotations

from collections.abc import Mapping

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.placement.nodes import fewest_nodes
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


def place_counts(view: View, counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Devices for jobs with so many devices each: whoever keeps its number stays, the others on few nodes.

    The largest are placed first, ties by arrival.
    """
    free = FreeDevices(view.cluster)
    target: dict[str, tuple[int, ...]] = {}
    for name, count in counts.items():
        job = view.jobs[name]
        if job.running and len(job.placement) == count:
            target[name] = job.placement
            free.take(job.placement)
    moving = [(-count, view.jobs[name].number, name) for name, count in counts.items() if name not in target]
    for negative, _, name in sorted(moving):
        devices = fewest_nodes(-negative, free)
        if devices is not None:
            free.take(devices)
            target[name] = devices
    return target
