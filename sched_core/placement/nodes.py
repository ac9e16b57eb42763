"""Placements that look at nodes: consolidated, the published YARN scheme, spread, random."""

from __future__ import annotations

import random

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.types import CONSOLIDATION_SKEW

from .placement import Count, StatelessPlacement


class Consolidated(StatelessPlacement):
    """As few nodes as possible: one node if the job fits into one, else whole nodes and one remainder.

    It waits rather than take more nodes. Among suitable nodes it takes the fullest, so that whole ones stay
    free.
    """

    name = "consolidated"

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        whole_size = len(free.nodes_with) - 1
        if not free.cluster.even:
            return _on_least_nodes(job.demand, free)
        whole, rest = divmod(job.demand, whole_size)
        nodes = free.nodes_with[whole_size]
        if len(nodes) < whole:
            return None
        chosen = [device for node in nodes[:whole] for device in free.on_node[node]]
        if rest:
            node = self._for_rest(rest, whole, free)
            if node is None:
                return None
            chosen += free.on_node[node][:rest]
        return tuple(chosen)

    def _for_rest(self, rest: int, whole: int, free: FreeDevices) -> int | None:
        """Return the node for ``rest`` devices if the first ``whole`` empty nodes are taken, or None."""
        for count in range(rest, len(free.nodes_with)):
            nodes = free.nodes_with[count]
            taken = whole if count == len(free.nodes_with) - 1 else 0
            if len(nodes) > taken:
                return nodes[taken]
        return None


def _on_least_nodes(demand: int, free: FreeDevices) -> tuple[int, ...] | None:
    """Return devices on nodes of several sizes, if no more nodes than an empty cluster needs; else None."""
    devices = fewest_nodes(demand, free)
    if devices is None:
        return None
    least, room = 0, 0
    for size in sorted(free.cluster.node_sizes, reverse=True):
        least, room = least + 1, room + size
        if room >= demand:
            break
    return devices if len(free.cluster.nodes(devices)) <= least else None


class PublishedYarn(Consolidated):
    """``yarn`` of the simulator published with Tiresias: the first node that fits, not the fullest."""

    name = "published-yarn"

    def _for_rest(self, rest: int, whole: int, free: FreeDevices) -> int | None:
        last = len(free.nodes_with) - 1
        lists = [nodes[whole if count == last else 0 :] for count, nodes in enumerate(free.nodes_with)]
        return min((nodes[0] for nodes in lists[rest:] if nodes), default=None)


class RoundUp(Consolidated):
    """Consolidated, in aligned blocks of 1, 2, 4 devices or whole nodes (after Chronus' Allocator).

    A job starts in a wholly free block of its demand rounded up, so blocks never straddle and nodes do not
    fragment. It holds only the devices that it asked for; smaller jobs may use the rest of its block. On
    nodes of several sizes, jobs larger than a node are consolidated only.
    """

    name = "round-up"

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        node_size = len(free.nodes_with) - 1
        block = self.rounded(job.demand, node_size)
        if block > node_size and not free.cluster.even:
            return super().choose(job, free)
        if block > node_size:
            whole = free.nodes_with[node_size][: block // node_size]
            devices = [device for node in whole for device in free.on_node[node]]
            return tuple(devices[: job.demand]) if len(devices) == block else None
        for nodes in free.nodes_with[block:]:
            for node in nodes:
                found = self._block(free, node, block)
                if found is not None:
                    return tuple(found[: job.demand])
        return None

    @staticmethod
    def rounded(demand: int, node_size: int) -> int:
        """Return the next power of two below a node's size, else the next multiple of ``node_size``."""
        if demand > node_size // 2:
            return -(-demand // node_size) * node_size
        return 1 << (demand - 1).bit_length()

    @staticmethod
    def _block(free: FreeDevices, node: int, block: int) -> list[int] | None:
        """Return the first aligned block of ``node`` that is wholly free, or None."""
        groups: dict[int, list[int]] = {}
        for device in free.on_node[node]:
            group = groups.setdefault(free.cluster.local_of(device) // block, [])
            group.append(device)
            if len(group) == block:
                return group
        return None


def fewest_nodes(demand: int, free: FreeDevices) -> tuple[int, ...] | None:
    """Return devices on the nodes with most free ones, the last on the tightest node; None if too few."""
    if demand > free.total:
        return None
    chosen: list[int] = []
    taken: set[int] = set()
    by_count = free.nodes_with
    while demand > len(chosen):
        rest = demand - len(chosen)
        for nodes in (*by_count[rest:], *reversed(by_count[1:rest])):
            node = next((node for node in nodes if node not in taken), None)
            if node is not None:
                taken.add(node)
                chosen += free.on_node[node][:rest]
                break
    return tuple(chosen)


class Spread(StatelessPlacement):
    """One device at a time from the emptiest node: as many nodes as possible."""

    name = "spread"

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        if job.demand > free.total:
            return None
        left = {node: list(devices) for node, devices in enumerate(free.on_node) if devices}
        chosen: list[int] = []
        while len(chosen) < job.demand:
            for node in sorted(left, key=lambda node: (-len(left[node]), node)):
                chosen.append(left[node].pop(0))
                if len(chosen) == job.demand:
                    break
            left = {node: devices for node, devices in left.items() if devices}
        return tuple(chosen)


class Random(StatelessPlacement):
    """Any free devices, drawn at random.

    Parameters
    ----------
    seed
        Same seed, same draws.
    """

    name = "random"

    def __init__(self, *, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        if job.demand > free.total:
            return None
        return tuple(sorted(self._draw.sample([d for devices in free.on_node for d in devices], job.demand)))


class SkewAware(StatelessPlacement):
    """Consolidate only jobs whose model suffers from being spread (Tiresias, section 3.3).

    Parameters
    ----------
    threshold
        Smallest skew, the share of the largest tensor in a model's parameters, that asks for consolidation.
        Models of known families are judged by name where the skew is neither stated nor measured; others
        count as insensitive.
    """

    name = "skew"

    def __init__(self, *, threshold: float = CONSOLIDATION_SKEW) -> None:
        self._threshold = threshold
        self._consolidated = Consolidated()
        self._anywhere = Count()

    def choose(self, job: Job, free: FreeDevices) -> tuple[int, ...] | None:
        return (self._consolidated if self._sensitive(job) else self._anywhere).choose(job, free)

    def kind(self, job: Job) -> str:
        return "skewed" if self._sensitive(job) else ""

    def _sensitive(self, job: Job) -> bool:
        if job.skew is not None:
            return job.skew >= self._threshold
        return job.spec.model.lower().startswith(("vgg", "alexnet"))
