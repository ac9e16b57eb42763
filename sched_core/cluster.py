"""What there is to give away: devices numbered 0..N-1, grouped in nodes."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from gpuslice.errors import UsageError

_GRID = re.compile(r"(\d{1,9})x(\d{1,9})")
_MOST = 10_000_000


class Cluster:
    """Nodes and their devices. Devices are numbered through, node after node.

    Parameters
    ----------
    node_sizes
        Devices of each node.
    """

    def __init__(self, node_sizes: Sequence[int]) -> None:
        if not node_sizes or min(node_sizes) < 1:
            raise UsageError(f"a cluster of nodes {list(node_sizes)} has no devices", "write NODESxDEVICES")
        self.node_sizes: tuple[int, ...] = tuple(node_sizes)
        self.node_of: list[int] = [node for node, size in enumerate(node_sizes) for _ in range(size)]
        self.size = len(self.node_of)
        self._first_of = list(accumulate(self.node_sizes, initial=0))

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``4x8`` (4 nodes of 8 devices) or a sum such as ``2x8+1x4``.

        Raises
        ------
        UsageError
            If ``text`` is neither.
        """
        sizes: list[int] = []
        for term in text.split("+"):
            match = _GRID.fullmatch(term.strip().lower())
            if match is None:
                raise UsageError(f"{text!r} is not a cluster", "write NODESxDEVICES, such as 4x8 or 2x8+1x4")
            nodes, size = int(match[1]), int(match[2])
            if len(sizes) + nodes * size > _MOST:
                raise UsageError(f"{text} has more than {_MOST:,} devices", "simulate a smaller cluster")
            sizes += [size] * nodes
        return cls(sizes)

    def nodes(self, devices: Iterable[int]) -> set[int]:
        """The nodes that ``devices`` lie on."""
        return {self.node_of[device] for device in devices}

    def on(self, node: int) -> range:
        """The devices of ``node``."""
        return range(self._first_of[node], self._first_of[node + 1])

    def local_of(self, device: int) -> int:
        """Position of ``device`` on its node."""
        return device - self._first_of[self.node_of[device]]

    def __str__(self) -> str:
        terms: list[str] = []
        sizes = list(self.node_sizes)
        while sizes:
            run = next((i for i, size in enumerate(sizes) if size != sizes[0]), len(sizes))
            terms.append(f"{run}x{sizes[0]}")
            del sizes[:run]
        return "+".join(terms)


class FreeDevices:
    """The devices nobody holds, findable by node and by how many a node has left.

    A placement reads it; whoever keeps it calls ``take`` and ``give``. Both cost a few operations per device.

    Attributes
    ----------
    total
        How many devices are free.
    on_node
        ``on_node[n]``: free devices of node ``n``, ascending.
    nodes_with
        ``nodes_with[k]``: the nodes with exactly ``k`` free devices, ascending.
    """

    def __init__(self, cluster: Cluster, devices: Iterable[int] | None = None) -> None:
        self.cluster = cluster
        self.total = 0
        self.on_node: list[list[int]] = [[] for _ in cluster.node_sizes]
        for device in range(cluster.size) if devices is None else devices:
            self.on_node[cluster.node_of[device]].append(device)
            self.total += 1
        self.nodes_with: list[list[int]] = [[] for _ in range(max(cluster.node_sizes) + 1)]
        for node, free in enumerate(self.on_node):
            free.sort()
            self.nodes_with[len(free)].append(node)

    def has(self, devices: Iterable[int]) -> bool:
        """Whether all of ``devices`` are free; devices that this cluster does not have are not."""
        node_of = self.cluster.node_of
        return all(device < len(node_of) and device in self.on_node[node_of[device]] for device in devices)

    def take(self, devices: Sequence[int]) -> None:
        """Remove ``devices``, which must be free."""
        self._change(devices, _remove)
        self.total -= len(devices)

    def give(self, devices: Sequence[int]) -> None:
        """Put back ``devices``, which must not be free."""
        self._change(devices, insort)
        self.total += len(devices)

    def _change(self, devices: Sequence[int], change: Callable[[list[int], int], None]) -> None:
        """Change what is free, node by node."""
        node_of, node = self.cluster.node_of, -1
        free: list[int] = []
        count = 0
        for device in devices:
            if node_of[device] != node:
                self._move(node, count, len(free))
                node = node_of[device]
                free = self.on_node[node]
                count = len(free)
            change(free, device)
        self._move(node, count, len(free))

    def copy(self) -> FreeDevices:
        """An independent copy, to try things on."""
        twin = object.__new__(FreeDevices)
        twin.cluster, twin.total = self.cluster, self.total
        twin.on_node = [list(free) for free in self.on_node]
        twin.nodes_with = [list(nodes) for nodes in self.nodes_with]
        return twin

    def _move(self, node: int, before: int, after: int) -> None:
        if before != after:
            nodes = self.nodes_with[before]
            del nodes[bisect_left(nodes, node)]
            insort(self.nodes_with[after], node)


def _remove(devices: list[int], device: int) -> None:
    del devices[bisect_left(devices, device)]
