"""Placement by levels inside nodes: NVLink islands, PCIe switches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job

from .nodes import Consolidated, fewest_nodes
from .placement import StatelessPlacement


class Topology(StatelessPlacement):
    """A placement on the closest level that holds the job: an island of a node, a larger one, a node, nodes.

    Parameters
    ----------
    levels
        Sizes of the groups inside a node, smallest first, each dividing the next: ``2,4`` are pairs on one
        NVLink bridge within fours on one PCIe switch.
    relax
        True if a job that fits no node may take several (as few as possible); False if it waits.
    """

    name = "topology"

    def __init__(self, *, levels: tuple[int, ...] = (2, 4), relax: bool = True) -> None:
        if any(size < 1 for size in levels) or any(b % a for a, b in pairwise(levels)):
            raise ConfigError(
                f"levels={levels} do not divide one another", "write 2,4 for pairs within fours"
            )
        self._levels = levels
        self._relax = relax
        self._nodes = Consolidated()

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        for size in self._levels:
            if job.demand <= size and (devices := self._in_groups(job.demand, size, free)) is not None:
                return devices
        whole = self._nodes.choose(job, free)
        return fewest_nodes(job.demand, free) if whole is None and self._relax else whole

    def _in_groups(self, wanted: int, size: int, free: FreeDevices) -> tuple[int, ...] | None:
        """Return ``wanted`` devices of the fullest group of ``size`` that has them, or None."""
        best: Sequence[int] | None = None
        for devices in free.on_node:
            if len(devices) < wanted:
                continue
            groups: dict[int, list[int]] = {}
            for device in devices:
                groups.setdefault(free.cluster.local_of(device) // size, []).append(device)
            for group in groups.values():
                if len(group) >= wanted and (best is None or len(group) < len(best)):
                    best = group
        return None if best is None else tuple(best[:wanted])
