"""The contract of placements, and the simplest of them."""

from __future__ import annotations

from typing import Protocol

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job


class Placement(Protocol):
    """Chooses devices for one job.

    Attributes
    ----------
    name
        As in ``--placement``.
    """

    name: str

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        """Devices for ``job``, rank order, or ``None`` to wait for better ones. Does not change ``free``."""
        ...

    def kind(self, job: Job) -> str:
        """Jobs of equal demand and equal kind fit or do not fit alike; lets policies try only one of them.

        It may change while ``job`` runs, when more becomes known of it.
        """
        ...

    def placed(self, job: Job, devices: tuple[int, ...]) -> None:
        """``job`` gets ``devices``, which were chosen for it; choices may also come to nothing."""
        ...


class StatelessPlacement:
    """Base of placements that treat jobs of equal demand alike and remember nothing."""

    def kind(self, job: Job) -> str:
        return ""

    def placed(self, job: Job, devices: tuple[int, ...]) -> None:
        pass


class Count(StatelessPlacement):
    """Any free devices will do: lowest-numbered nodes with the fewest free ones first.

    Always succeeds when there are enough.
    """

    name = "count"

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        wanted = job.demand
        if wanted > free.total:
            return None
        chosen: list[int] = []
        for nodes in free.nodes_with[1:]:
            for node in nodes:
                chosen += free.on_node[node][: wanted - len(chosen)]
                if len(chosen) == wanted:
                    return tuple(chosen)
        raise AssertionError("free.total disagrees with its nodes")
