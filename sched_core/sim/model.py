"""What the simulator assumes of jobs: how fast they run where, and what a switch costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job


class SpeedModel(Protocol):
    """How fast a job runs on given devices."""

    def rate(self, job: Job, neighbours: Sequence[Job], cluster: Cluster) -> float:
        """Return the progress per second on ``job.placement``.

        ``neighbours`` share its most crowded device.
        """
        ...


class LinearSpeed:
    """Devices add up, placement does not matter, and packed jobs share a device without gain or loss."""

    def rate(self, job: Job, neighbours: Sequence[Job], cluster: Cluster) -> float:
        return len(job.placement) / job.demand / (1 + len(neighbours))


class SwitchCost(Protocol):
    """How long a job holds its devices without progress when it is brought back."""

    def resume_s(self, job: Job) -> float:
        """Return the seconds lost when ``job`` is resumed or moved: suspend and resume together."""
        ...


class NoCost:
    """Switching is free."""

    def resume_s(self, job: Job) -> float:
        return 0.0


class FixedCost:
    """Every resume costs the same.

    Parameters
    ----------
    seconds
        The cost.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def resume_s(self, job: Job) -> float:
        return self._seconds
