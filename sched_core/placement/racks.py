"""Placement over racks: a job of several nodes lies in one rack if possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job

from .nodes import Consolidated


class Racks(Consolidated):
    """As few nodes as possible, all in one rack: among suitable racks the one with the fewest idle nodes.

    Jobs that fit into a node are placed by ``Consolidated``. On nodes of several sizes racks are ignored.

    Parameters
    ----------
    relax
        True if a job that finds no rack takes as few as possible; False if it waits for a rack that could.
    """

    name = "racks"

    def __init__(self, *, relax: bool = True) -> None:
        self._relax = relax

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        cluster, size = free.cluster, len(free.nodes_with) - 1
        if job.demand <= size or len(cluster.rack_sizes) == 1 or not cluster.even:
            return super().choose(job, free)
        whole, rest = divmod(job.demand, size)
        idle: dict[int, list[int]] = {}
        for node in free.nodes_with[size]:
            idle.setdefault(cluster.rack_of[node], []).append(node)
        for rack in sorted(idle, key=lambda rack: (len(idle[rack]), rack)):
            if len(idle[rack]) >= whole and (nodes := self._in(rack, idle[rack][:whole], rest, free)):
                return self._devices(nodes, job.demand, free)
        if not self._relax and cluster.closest(job.demand).racks == 1:
            return None
        found = [
            node for rack in sorted(idle, key=lambda rack: (-len(idle[rack]), rack)) for node in idle[rack]
        ]
        if len(found) < whole:
            return None
        taken = found[:whole]
        racks = list(dict.fromkeys(cluster.rack_of[node] for node in reversed(taken)))
        racks += [rack for rack in range(len(cluster.rack_sizes)) if rack not in racks]
        choices = (nodes for rack in racks if (nodes := self._in(rack, taken, rest, free)))
        return self._devices(next(choices, []), job.demand, free)

    def _in(self, rack: int, taken: list[int], rest: int, free: FreeDevices) -> list[int]:
        """Return ``taken`` and the fullest other node of ``rack`` with room for ``rest``; else nothing."""
        if not rest:
            return taken
        for count in range(rest, len(free.nodes_with)):
            for node in _of_rack(rack, free.nodes_with[count], free):
                if node not in taken:
                    return [*taken, node]
        return []

    @staticmethod
    def _devices(nodes: list[int], demand: int, free: FreeDevices) -> tuple[int, ...] | None:
        found = [device for node in nodes for device in free.on_node[node]]
        return tuple(found[:demand]) if nodes else None


def _of_rack(rack: int, nodes: list[int], free: FreeDevices) -> Iterator[int]:
    """Yield the nodes of an ascending list that are in ``rack``."""
    ours = free.cluster.in_rack(rack)
    for position in range(bisect_left(nodes, ours.start), len(nodes)):
        if nodes[position] not in ours:
            return
        yield nodes[position]
