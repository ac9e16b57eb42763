"""Replicas: every n-th snapshot of a job is also on another node, so that a lost node loses no job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from gpuslice.errors import NodeLostError, UsageError

from .messages import Held, decode, encode
from .ray_nodes import Node, call
from .sender import newest_held, open_disk
from .shipping import Shipment, ship


def held_on(job: str, node: Node, ranks: int | None = None) -> Held | None:
    """Return the newest whole snapshot of a job on a node; None if it has none."""
    found: bytes | None = call(held_here, node, job, node.flags, ranks)
    return None if found is None else decode(found, Held)


def held_here(job: str, flags: Mapping[str, str], ranks: int | None) -> bytes | None:
    """Return the newest whole snapshot of a job on this node, encoded; None if it has none."""
    held = newest_held(open_disk(flags), job, ranks)
    return None if held is None else encode(held)


def furthest(
    job: str,
    nodes: Iterable[Node],
    ranks: int | None = None,
    held_on: Callable[[str, Node, int | None], Held | None] = held_on,
) -> Node | None:
    """Return the first of ``nodes`` with the latest whole snapshot of the job; None if none has one."""
    held: list[tuple[int, Node]] = []
    for node in nodes:
        with suppress(NodeLostError):  # one that has just gone has nothing that could be sent
            if (found := held_on(job, node, ranks)) is not None:
                held.append((found.boundary, node))
    return max(held, key=lambda one: one[0])[1] if held else None


def forget_on(job: str, node: Node) -> None:
    """Remove the snapshots of a job from a node: the job has ended, or has its replica elsewhere."""
    call(_forget, node, job, node.flags)


def _forget(job: str, flags: Mapping[str, str]) -> None:
    disk = open_disk(flags)
    held = newest_held(disk, job)
    for rank in () if held is None else held.ranks:
        disk.open_store(job, rank).close(keep=False)


class Replication:
    """Keeps every n-th snapshot of a job on another node, and removes older ones there.

    Its state does not matter: a new process ships at most one snapshot again, of which no bytes are sent
    then.

    Parameters
    ----------
    job
        Its name.
    source, target
        The node on which the job runs, and the node of its replica.
    every
        One of so many snapshots is replicated; 1 for each of them.
    ranks
        How many ranks the job has, if that is known.
    """

    def __init__(self, job: str, source: Node, target: Node, every: int, ranks: int | None = None) -> None:
        if every < 1:
            raise UsageError(f"every {every}th snapshot cannot be replicated", "give 1 or more")
        self.job, self.source, self.target = job, source, target
        self.every, self.ranks = every, ranks
        self._replicated = 0  # the generation up to which it was seen to

    def is_due(self, generation: int) -> bool:
        """Return True if an n-th snapshot was taken since the last replica, given the newest one's number."""
        return generation // self.every > self._replicated // self.every

    def step(self) -> Shipment | None:
        """Replicate the newest snapshot, if that is due. Call it after each snapshot of the job.

        Return None if it is not due. Raises as `ship` does; then it stays due.
        """
        held = held_on(self.job, self.source, self.ranks)
        if held is None or not self.is_due(held.generation):
            return None
        shipment = ship(self.job, self.source, self.target, ranks=self.ranks)
        self._replicated = held.generation
        return shipment
