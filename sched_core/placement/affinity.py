"""Placement by affinity: each node is for one class of job size (Gandiva, OSDI 2018, section 4.1)."""

from __future__ import annotations

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job

from .nodes import Consolidated


class Affinity(Consolidated):
    """A placement on the least loaded node with jobs of the same size class, else an empty node, else any.

    Classes are 1, 2, 4, ... devices. A node belongs to the class of the job that found it empty. Jobs that no
    node can hold get whole nodes and one remainder. Over-subscription, the paper's third choice, is for
    policies that take turns (``gandiva``).
    """

    name = "affinity"

    def __init__(self) -> None:
        #: Class by node; obsolete for nodes that are empty.
        self._class_of: dict[int, int] = {}
        #: Nodes that were empty, by chosen devices: another job of the same kind may get them.
        self._found_empty: dict[tuple[int, ...], set[int]] = {}

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        devices = self._on_one_node(job.demand, free) or super().choose(job, free)
        if devices is not None:
            sizes, node_of = free.cluster.node_sizes, free.cluster.node_of
            nodes = {node_of[device] for device in devices}
            self._found_empty[devices] = {node for node in nodes if len(free.on_node[node]) == sizes[node]}
        return devices

    def placed(self, job: Job, devices: tuple[int, ...]) -> None:
        for node in self._found_empty.pop(devices, ()):
            self._class_of[node] = size_class(job.demand)

    def _on_one_node(self, wanted: int, free: FreeDevices) -> tuple[int, ...] | None:
        sizes = free.cluster.node_sizes
        best: tuple[tuple[int, float, int], list[int]] | None = None
        for nodes in free.nodes_with[wanted:]:
            for node in nodes:
                devices = free.on_node[node]
                if len(devices) == sizes[node]:
                    choice = 1
                else:
                    choice = 0 if self._class_of.get(node) == size_class(wanted) else 2
                rank = (choice, -len(devices) / sizes[node], node)
                if best is None or rank < best[0]:
                    best = (rank, devices)
        return None if best is None else tuple(best[1][:wanted])


def size_class(demand: int) -> int:
    """Return the next power of two at or above ``demand``."""
    return 1 << (demand - 1).bit_length()
