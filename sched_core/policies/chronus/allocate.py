"""Sizes that never fragment a node, and where jobs go.

Source: Chronus (SoCC 2021), section 4.3, with its formula (6) corrected: what is rounded up is the number of
devices; the paper prints the running time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec

from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.placement.one_node import on_few_nodes, on_one_node


def round_up(devices: int, node_size: int, *, split: bool = False) -> int:
    """Return the next consolidation-friendly size: 1, 2, 4, … up to a node, then whole nodes.

    Parameters
    ----------
    split
        Round up only the rest beyond whole nodes: 10 on nodes of 8 becomes 8 + 2 instead of 16.
    """
    whole, rest = divmod(devices, node_size)
    if rest and whole and not split:
        return (whole + 1) * node_size
    size = 1
    while size < rest:
        size *= 2
    return whole * node_size + (min(size, node_size) if rest else 0)


class Request(msgspec.Struct, frozen=True):
    """A job to be placed, and the size of the block that is set aside for it."""

    job: Job
    block: int


def place_blocks(requests: Sequence[Request], free: FreeDevices) -> dict[str, tuple[int, ...]]:
    """Return devices for each job, placing the largest blocks first.

    Take from ``free`` what the jobs use.

    Jobs keep what they hold if the others then still find blocks; otherwise all are placed anew. A block that
    no node can hold is spread over what is left.
    """
    for keep in (True, False):
        trial = free.copy()
        placed = _placed(requests, trial, keep=keep)
        if placed is not None:
            break
    else:
        trial = free.copy()
        placed = _spread(requests, trial)
    for devices in placed.values():
        free.take(devices)
    return placed


def local_search(jobs: Sequence[Job], free: FreeDevices) -> dict[str, tuple[int, ...]]:
    """Return devices for each job, on few nodes, by hill climbing over the order of placing.

    Starts with the largest first and exchanges two jobs of the order as long as that lowers the number of
    nodes used beyond the least possible. Jobs that do not fit are left out. Takes from ``free``.
    """
    order = sorted(jobs, key=lambda job: (-job.demand, job.number))
    best = _in_order(order, free)
    cost = _excess(order, best, free)
    improved = cost > 0 and len(order) > 1
    while improved:
        improved = False
        for i, j in combinations(range(len(order)), 2):
            if order[i].demand == order[j].demand:
                continue
            order[i], order[j] = order[j], order[i]
            trial = _in_order(order, free)
            trial_cost = _excess(order, trial, free)
            if len(trial) >= len(best) and trial_cost < cost:
                best, cost, improved = trial, trial_cost, cost > 0
            else:
                order[i], order[j] = order[j], order[i]
    for devices in best.values():
        free.take(devices)
    return best


def _placed(
    requests: Sequence[Request], free: FreeDevices, *, keep: bool
) -> dict[str, tuple[int, ...]] | None:
    """Return devices for all jobs, each in whole nodes and one part of a node. None if that is impossible."""
    placed: dict[str, tuple[int, ...]] = {}
    if keep:
        for request in requests:
            if request.job.running and free.has(request.job.placement):
                placed[request.job.id] = request.job.placement
                free.take(request.job.placement)
    for request in sorted(requests, key=lambda r: (-r.block, r.job.number)):
        if request.job.id in placed:
            continue
        block = _block(request, free)
        if block is None:
            return None
        placed[request.job.id] = tuple(block[: request.job.demand])
        # What a block has too much may be used by jobs without guarantees.
        free.give(block[request.job.demand :])
    return placed


def _block(request: Request, free: FreeDevices) -> Sequence[int] | None:
    """Take the block of ``request`` from ``free`` and return its devices. Return None if it does not fit."""
    if request.job.within:
        block = on_one_node(request.job, request.block, free)
        free.take(block or ())
        return block
    node_size = len(free.nodes_with) - 1
    whole, rest = divmod(request.block, node_size)
    empty = free.nodes_with[node_size]
    if len(empty) < whole:
        return None
    found = [device for node in empty[:whole] for device in free.on_node[node]]
    free.take(found)
    if rest:
        node = next((nodes[0] for nodes in free.nodes_with[rest:] if nodes), None)
        if node is None:
            return None
        part = free.on_node[node][:rest]
        free.take(part)
        found += part
    return found


def _spread(requests: Sequence[Request], free: FreeDevices) -> dict[str, tuple[int, ...]]:
    ranked = sorted(requests, key=lambda request: (-request.block, request.job.number))
    return _in_order([request.job for request in ranked], free)


def _in_order(order: Sequence[Job], free: FreeDevices) -> dict[str, tuple[int, ...]]:
    """Return devices for the jobs of ``order``, placed one after the other.

    ``free`` is as before in the end.
    """
    placed: dict[str, tuple[int, ...]] = {}
    for job in order:
        devices = on_few_nodes(job, job.demand, free)
        if devices is not None:
            free.take(devices)
            placed[job.id] = devices
    for devices in placed.values():
        free.give(devices)
    return placed


def _excess(order: Sequence[Job], placed: Mapping[str, tuple[int, ...]], free: FreeDevices) -> int:
    node_size = len(free.nodes_with) - 1
    return sum(
        len(free.cluster.nodes(placed[job.id])) - -(-job.demand // node_size)
        for job in order
        if job.id in placed
    )
