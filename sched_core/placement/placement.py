"""The contract of placements, and the simplest placement."""

from __future__ import annotations

from typing import Protocol

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job


class Placement(Protocol):
    """The interface of what chooses devices for one job.

    Attributes
    ----------
    name
        As in ``--placement``.
    """

    name: str

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        """Return devices for ``job``, in rank order, or None to wait. ``free`` stays unchanged."""
        ...

    def kind(self, job: Job) -> str:
        """Return a text that is the same for jobs of equal demand that fit, or do not fit, alike.

        Policies then try only one of them. The kind may change while ``job`` runs, when more is known of it.
        """
        ...

    def placed(self, job: Job, devices: tuple[int, ...]) -> None:
        """Note that ``job`` gets the chosen ``devices``. Not every choice leads to this."""
        ...


class StatelessPlacement:
    """Base of placements that treat jobs of equal demand alike and keep no state."""

    def kind(self, job: Job) -> str:
        return ""

    def placed(self, job: Job, devices: tuple[int, ...]) -> None:
        pass


class Count(StatelessPlacement):
    """Any free devices: lowest-numbered nodes with the fewest free ones first.

    Always succeeds if there are enough.
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
