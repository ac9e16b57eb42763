"""The routes of a job's snapshots: from which node to which each rank's goes, so that the job can continue.

The ranks of a job need not have their snapshots on one node. The newest boundary counts of which each rank
has a snapshot on some living node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from .sender import open_disk

#: Boundaries of each rank's snapshots.
Boundaries = Sequence[Collection[int]]


class Routes(msgspec.Struct, frozen=True):
    """The snapshots of one boundary that must be sent, and between which nodes.

    Attributes
    ----------
    boundary
        The boundary at which the snapshots were taken.
    ways
        The ranks whose snapshot goes from one node to another, by their names; others are there already.
    """

    boundary: int
    ways: dict[tuple[str, str], tuple[int, ...]]


def choose(held: Mapping[str, Boundaries], targets: Sequence[str]) -> Routes | None:
    """Return the routes by which each rank's snapshot gets to its target; None if there is no whole one.

    Parameters
    ----------
    held
        What living nodes have, by name, of each rank.
    targets
        The node of each rank.
    """
    of_ranks = [{each for there in held.values() for each in there[rank]} for rank in range(len(targets))]
    if not of_ranks or not (whole := set.intersection(*of_ranks)):
        return None
    boundary = max(whole)
    ways: dict[tuple[str, str], list[int]] = {}
    for rank, target in enumerate(targets):
        sources = [name for name, there in held.items() if boundary in there[rank]]
        if target not in sources:
            ways.setdefault((sources[0], target), []).append(rank)
    return Routes(boundary, {way: tuple(ranks) for way, ranks in ways.items()})


def boundaries(job: str, ranks: int, flags: Mapping[str, str]) -> bytes:
    """Return the boundaries of a job's snapshots on this node, of each rank, encoded for ``decode``."""
    disk = open_disk(flags)
    return msgspec.msgpack.encode([sorted(disk.boundaries(job, rank)) for rank in range(ranks)])


def decode(data: bytes) -> Boundaries:
    """Return the boundaries that another node has encoded."""
    return msgspec.msgpack.decode(data, type=tuple[frozenset[int], ...])
