"""Choose the closest devices, where taking a device may have a price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuslice.sched_core.cluster import Cluster

#: Cost of a device, and its order among devices of equal cost.
Price = tuple[float, int]


def closest(count: int, prices: Mapping[int, Price], cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yield ``count`` devices at the lowest price: of one socket, of one node, of one rack, of fewest nodes.

    A level without enough devices is left out. The last two levels fill the nodes that offer most.

    Parameters
    ----------
    prices
        Prices of the available devices; lower tuples are taken first.
    """
    by_node: dict[int, list[int]] = {}
    by_socket: dict[int, list[int]] = {}
    for device in sorted(prices, key=lambda device: (prices[device], device)):
        by_node.setdefault(cluster.node_of[device], []).append(device)
        by_socket.setdefault(cluster.socket_of[device], []).append(device)
    for groups in (by_socket, by_node):
        found = [devices[:count] for devices in groups.values() if len(devices) >= count]
        if found:
            yield min((tuple(devices) for devices in found), key=lambda chosen: _sum(chosen, prices))
    if count <= max(cluster.node_sizes):
        return
    by_rack: dict[int, dict[int, list[int]]] = {}
    for node, devices in by_node.items():
        by_rack.setdefault(cluster.rack_of[node], {})[node] = devices
    in_racks = [chosen for nodes in by_rack.values() if (chosen := _fewest_nodes(count, nodes, prices))]
    if in_racks:
        yield min(in_racks, key=lambda chosen: (len(cluster.nodes(chosen)), _sum(chosen, prices)))
    if len(by_rack) > 1 and (anywhere := _fewest_nodes(count, by_node, prices)):
        yield anywhere


def _fewest_nodes(count: int, nodes: Mapping[int, list[int]], prices: Mapping[int, Price]) -> tuple[int, ...]:
    """Return whole nodes and the cheapest remainder; an empty tuple if there are too few devices."""
    chosen: list[int] = []
    left = dict(nodes)
    while left and len(chosen) < count:
        rest = count - len(chosen)
        enough = [node for node, devices in left.items() if len(devices) >= rest]
        if enough:
            node = min(enough, key=lambda node: (_sum(left[node][:rest], prices), len(left[node]), node))
        else:
            node = min(left, key=lambda node: (-len(left[node]), _sum(left[node], prices), node))
        chosen += left.pop(node)[:rest]
    return tuple(chosen) if len(chosen) == count else ()


def _sum(devices: tuple[int, ...] | list[int], prices: Mapping[int, Price]) -> tuple[float, int]:
    return sum(prices[device][0] for device in devices), sum(prices[device][1] for device in devices)
