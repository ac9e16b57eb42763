"""Placement by local search: few nodes, and little fragmentation."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job

from .nodes import fewest_nodes
from .placement import StatelessPlacement

#: Number of devices by node.
Parts = dict[int, int]


class LocalSearch(StatelessPlacement):
    """Hill climbing from the fewest nodes: one node is exchanged for another while that reduces fragments.

    After the Allocator of Chronus (SoCC 2021, section 4.3), which so places jobs whose size can fragment
    nodes; ``--policy chronus`` searches over several jobs at once. It waits for devices only.

    Parameters
    ----------
    steps
        Most exchanges per job.
    """

    name = "local-search"

    def __init__(self, *, steps: int = 32) -> None:
        self._steps = steps

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        start = fewest_nodes(job.demand, free)
        if start is None:
            return None
        nodes = sorted(free.cluster.nodes(start))
        cost = _cost(_parts(nodes, job.demand, free), free)
        for _ in range(self._steps):
            best = min(
                ((_cost(_parts(n, job.demand, free), free), n) for n in _swaps(nodes, free)), default=None
            )
            if best is None or best[0] >= cost:
                break
            cost, nodes = best
        parts = _parts(nodes, job.demand, free)
        return tuple(device for node in nodes for device in free.on_node[node][: parts[node]])


def _swaps(nodes: list[int], free: FreeDevices) -> Iterator[list[int]]:
    """Yield ``nodes`` with one exchanged for the first other node of each number of free devices."""
    others = [next((n for n in alike if n not in nodes), None) for alike in free.nodes_with[1:]]
    for old in nodes:
        for new in others:
            if new is not None:
                yield sorted({*nodes, new} - {old})


def _parts(nodes: list[int], demand: int, free: FreeDevices) -> Parts:
    """Return how many devices to take of each node. Fragmented nodes keep what is too much."""
    parts = {node: len(free.on_node[node]) for node in nodes}
    spare = sum(parts.values()) - demand
    if spare < 0:
        return {}
    for node in sorted(parts, key=lambda node: (parts[node] == free.cluster.node_sizes[node], -parts[node])):
        left = min(spare, parts[node] - 1)
        parts[node] -= left
        spare -= left
    return parts


def _cost(parts: Parts, free: FreeDevices) -> tuple[float, int, int]:
    """Return nodes used, whole nodes broken, nodes left fragmented; infinity if too few devices."""
    if not parts:
        return inf, 0, 0
    sizes = free.cluster.node_sizes
    left = {node: len(free.on_node[node]) - count for node, count in parts.items()}
    broken = sum(rest > 0 and len(free.on_node[node]) == sizes[node] for node, rest in left.items())
    return len(parts), broken, sum(rest > 0 for rest in left.values())
