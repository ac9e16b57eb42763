"""The devices of a cluster, numbered 0..N-1 and grouped in racks, nodes and sockets."""

from __future__ import annotations

import copy
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from gpuslice.errors import UsageError

_GRID = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x(\d{1,9})(?:/(\d{1,9}))?")
_MOST = 10_000_000


class Extent(NamedTuple):
    """The numbers of racks, nodes and sockets that some devices lie on. Small numbers mean close devices."""

    racks: int
    nodes: int
    sockets: int


class Cluster:
    """The racks, the nodes and their devices. Devices are numbered through, node after node.

    Parameters
    ----------
    node_sizes
        The number of devices of each node.
    rack_sizes
        The number of nodes of each rack, in the order of the nodes. If not given, all are in one rack.
    socket_sizes
        The number of devices of each socket, node after node. If not given, every node is one socket.

    Attributes
    ----------
    size
        The number of devices that can be had.
    node_of
        The node of each device, also of devices that cannot be had (``without``).
    even
        True if all nodes of which devices can be had have equally many.
    """

    def __init__(
        self,
        node_sizes: Sequence[int],
        rack_sizes: Sequence[int] | None = None,
        socket_sizes: Sequence[int] | None = None,
    ) -> None:
        if not node_sizes or min(node_sizes) < 1:
            raise UsageError(f"a cluster of nodes {list(node_sizes)} has no devices", "write NODESxDEVICES")
        self.node_sizes: tuple[int, ...] = tuple(node_sizes)
        self.rack_sizes = (len(node_sizes),) if rack_sizes is None else tuple(rack_sizes)
        self.socket_sizes = self.node_sizes if socket_sizes is None else tuple(socket_sizes)
        self.rack_of: list[int] = [rack for rack, size in enumerate(self.rack_sizes) for _ in range(size)]
        self.socket_of: list[int] = [
            socket for socket, size in enumerate(self.socket_sizes) for _ in range(size)
        ]
        self.node_of: list[int] = [node for node, size in enumerate(node_sizes) for _ in range(size)]
        self.size = len(self.node_of)
        self._first_of = list(accumulate(self.node_sizes, initial=0))
        #: The devices that are left of nodes of which some cannot be had.
        self._left: dict[int, tuple[int, ...]] = {}
        if len(self.rack_of) != len(self.node_sizes) or len(self.socket_of) != self.size:
            raise UsageError(
                f"racks of {list(self.rack_sizes)} nodes and sockets of {list(self.socket_sizes)} devices "
                f"are not those of nodes {list(self.node_sizes)}",
                "name every node and device once",
            )
        self._first_node_of = list(accumulate(self.rack_sizes, initial=0))
        self._measure()

    def _measure(self) -> None:
        """Compute ``even`` and the capacities of the largest racks, nodes and sockets."""
        self.even = len({*self.node_sizes} - {0}) == 1
        of_racks = [sum(self.node_sizes[a:b]) for a, b in pairwise(self._first_node_of)]
        self._largest_first = [
            list(accumulate(sorted(sizes, reverse=True)))
            for sizes in (of_racks, self.node_sizes, self.socket_sizes)
        ]

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Return the cluster written as ``4x8`` (4 nodes of 8), ``2x4x8`` (2 racks of these) or ``2x8+1x4``.

        ``4x8/2`` are nodes of 2 sockets. Terms without racks that follow each other are one rack.

        Raises
        ------
        UsageError
            If ``text`` is none of these.
        """
        sizes: list[int] = []
        racks: list[int] = []
        sockets: list[int] = []
        devices, apart = 0, True
        for term in text.split("+"):
            match = _GRID.fullmatch(term.strip().lower())
            if match is None:
                raise UsageError(
                    f"{text!r} is not a cluster", "write NODESxDEVICES, such as 4x8, or RACKSxNODESxDEVICES"
                )
            of_racks, nodes, size, parts = (int(number or 1) for number in match.groups())
            devices += of_racks * nodes * size
            if devices > _MOST:
                raise UsageError(f"{text} has more than {_MOST:,} devices", "simulate a smaller cluster")
            if not nodes or not size or not parts or size % parts:
                raise UsageError(
                    f"{text!r} is not a cluster: {term.strip()} has {size} devices on {parts} sockets",
                    "write NODESxDEVICES/SOCKETS, with as many devices on each socket",
                )
            sizes += [size] * (of_racks * nodes)
            if match[1] is None and not apart:
                racks[-1] += nodes
            else:
                racks += [nodes] * of_racks
            apart = match[1] is not None
            sockets += [size // parts] * (of_racks * nodes * parts)
        return cls(sizes, racks, sockets)

    @classmethod
    def one_node(cls, devices: int, sockets: int = 1) -> Cluster:
        """Return a cluster of one node, whose devices lie on ``sockets`` sockets in equal parts, in order.

        Raises
        ------
        UsageError
            If they cannot.
        """
        if sockets < 1 or devices % sockets:
            raise UsageError(
                f"{devices} devices do not lie on {sockets} sockets in equal parts",
                "name as many devices of each socket, socket by socket",
            )
        return cls([devices], socket_sizes=[devices // sockets] * sockets)

    def nodes(self, devices: Iterable[int]) -> set[int]:
        """Return the nodes that ``devices`` lie on."""
        return {self.node_of[device] for device in devices}

    def extent(self, devices: Iterable[int]) -> Extent:
        """Return how many racks, nodes and sockets ``devices`` lie on."""
        devices = tuple(devices)
        nodes = self.nodes(devices)
        racks = {self.rack_of[node] for node in nodes}
        return Extent(len(racks), len(nodes), len({self.socket_of[device] for device in devices}))

    def closest(self, count: int) -> Extent:
        """Return the least extent that ``count`` devices of this cluster have if it is empty."""
        return Extent(*(_fewest(count, sizes) for sizes in self._largest_first))

    def on(self, node: int) -> Sequence[int]:
        """Return the devices of ``node`` that can be had."""
        if node in self._left:
            return self._left[node]
        return range(self._first_of[node], self._first_of[node] + self.node_sizes[node])

    def in_rack(self, rack: int) -> range:
        """Return the nodes of ``rack``."""
        return range(self._first_node_of[rack], self._first_node_of[rack + 1])

    def without(self, nodes: Container[int], devices: Container[int] = ()) -> Cluster:
        """Return the same cluster, in which no device of ``nodes`` and none of ``devices`` can be had.

        Everything keeps its number.
        """
        less = copy.copy(self)
        less._left = dict(self._left)
        for node in range(len(self.node_sizes)):
            there = self.on(node)
            left = () if node in nodes else tuple(device for device in there if device not in devices)
            if len(left) < len(there):
                less._left[node] = left
        less.node_sizes = tuple(
            len(less._left.get(node, range(size))) for node, size in enumerate(self.node_sizes)
        )
        less.size = sum(less.node_sizes)
        of_sockets = [0] * len(self.socket_sizes)
        for node in range(len(less.node_sizes)):
            for device in less.on(node):
                of_sockets[self.socket_of[device]] += 1
        less.socket_sizes = tuple(of_sockets)
        less._measure()
        return less

    def local_of(self, device: int) -> int:
        """Return the position of ``device`` on its node."""
        return device - self._first_of[self.node_of[device]]

    def __str__(self) -> str:
        """Return the cluster as ``parse`` reads it, without nodes of which no device can be had."""
        racks: list[str] = []
        first = 0
        for size in self.rack_sizes:
            nodes = [self._written(node) for node in range(first, first + size) if self.node_sizes[node]]
            racks.append("+".join(f"{len(list(run))}x{written}" for written, run in groupby(nodes)))
            first += size
        racks = [rack for rack in racks if rack]
        if len(racks) == 1:
            return racks[0]
        runs = [(rack, len(list(run))) for rack, run in groupby(racks)]
        return "+".join(rack if "+" in rack else f"{count}x{rack}" for rack, count in runs)

    def _written(self, node: int) -> str:
        """Return the number of devices of ``node``, and of its sockets if it has several, as text."""
        sockets = len({self.socket_of[device] for device in self.on(node)})
        return f"{self.node_sizes[node]}/{sockets}" if sockets > 1 else str(self.node_sizes[node])


def _fewest(count: int, sums: Sequence[int]) -> int:
    """Return the least number of groups that hold ``count`` devices.

    ``sums`` has the sizes of the largest group, of the two largest together, and so on.
    """
    return bisect_left(sums, count) + 1


class FreeDevices:
    """The devices that no job holds, by node and by how many a node has left.

    A placement reads them. The owner of this object calls ``take`` and ``give``, which cost a few operations
    per device.

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
        on_node: list[list[int]] = [[] for _ in cluster.node_sizes]
        if devices is None:
            on_node = [list(cluster.on(node)) for node in range(len(on_node))]
        else:
            for device in devices:
                on_node[cluster.node_of[device]].append(device)
            for free in on_node:
                free.sort()
        self._be(cluster, on_node)

    @classmethod
    def besides(cls, cluster: Cluster, held: Container[int]) -> FreeDevices:
        """Return all devices of ``cluster`` except those that are ``held``."""
        made = object.__new__(cls)
        nodes = range(len(cluster.node_sizes))
        made._be(cluster, [[device for device in cluster.on(node) if device not in held] for node in nodes])
        return made

    def _be(self, cluster: Cluster, on_node: list[list[int]]) -> None:
        self.cluster, self.on_node = cluster, on_node
        self.total = sum(map(len, on_node))
        self.nodes_with: list[list[int]] = [[] for _ in range(max(cluster.node_sizes) + 1)]
        for node, free in enumerate(on_node):
            self.nodes_with[len(free)].append(node)

    def has(self, devices: Iterable[int]) -> bool:
        """Return True if all of ``devices`` are free. Devices that the cluster does not have are not free."""
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
        """Change the free devices node by node: call ``change`` for each of ``devices``."""
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

    def without(self, devices: Iterable[int]) -> FreeDevices:
        """Return the free devices that are none of ``devices``; this object itself if these are not free."""
        taken = [device for device in sorted(devices) if self.has((device,))]
        if not taken:
            return self
        left = self.copy()
        left.take(taken)
        return left

    def copy(self) -> FreeDevices:
        """Return an independent copy, to try changes on."""
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
