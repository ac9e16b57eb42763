"""Ship a job's newest whole snapshot from one node's RAM disk to another's, by Ray's object store.

The calling process holds no bytes: it has a sender on one node and a receiver on the other, and passes
references from the first to the second. Ray's object stores move the bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuslice.errors import NodeLostError, ReplacedSnapshotError, UsageError

from .messages import PORTION_BYTES, Held, Missing, decode, encode
from .ray_nodes import Node, actor, end, result, settle
from .receiver import Receiver
from .sender import Sender

#: Portions under way at a time: one is read, one moved, one written, and one is spare.
_UNDER_WAY = 4
#: Number of attempts without any arrival, and of attempts while newer snapshots replace the chosen one.
_ATTEMPTS = 3

Progress = Callable[[int], object]


class Shipment(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a shipment.

    Attributes
    ----------
    job
        Its name.
    boundary
        The boundary at which the snapshot was taken.
    ranks
        How many ranks have one.
    source, target
        The nodes' names.
    payload_bytes
        Bytes of all ranks' states, padding included.
    sent_bytes
        Bytes of it that went from node to node: what was there already, or is equal on several ranks, did not
        go again.
    seconds
        How long it took, on the clock of the process that asked.
    """

    job: str
    boundary: int
    ranks: int
    source: str
    target: str
    payload_bytes: int
    sent_bytes: int
    seconds: float


def ship(
    job: str,
    source: Node,
    target: Node,
    *,
    ranks: int | Sequence[int] | None = None,
    boundary: int | None = None,
    replace: bool = False,
    portion_bytes: int = PORTION_BYTES,
    progress: Progress | None = None,
) -> Shipment:
    """Copy the newest whole snapshot of a named job from one node to another; inside ``connected``.

    It is published there when all ranks are whole, and the older ones there are removed then. If a process on
    either node dies, it is begun again; what has arrived is not sent again, nor by a later call.

    Parameters
    ----------
    ranks
        How many ranks the job has, or which of them go; by default those that have a store at the source.
    boundary
        Boundary of the snapshot; by default the newest one.
    replace
        True to replace a later snapshot.
    portion_bytes
        What is sent at a time.
    progress
        Called with the bytes of each portion that has arrived.

    Raises
    ------
    UsageError
        If there is no whole snapshot, or the job runs or has come further at the target.
    RamDiskFullError
        If the target has no room; everything there is as before.
    CorruptSnapshotError
        If bytes are damaged at the source or on their way; nothing is published.
    ReplacedSnapshotError
        If the job takes snapshots faster than they can be sent.
    NodeLostError
        If a node has gone.
    """
    if source.id == target.id:
        raise UsageError(f"{job} is on node {source.name} already", "name another node")
    began_s = time.monotonic()
    shipping = _Shipping(job, source, target, ranks, boundary, replace, portion_bytes, progress)
    held, payload_bytes = shipping.finish()
    return Shipment(
        job=job,
        boundary=held.boundary,
        ranks=len(held.ranks),
        source=source.name,
        target=target.name,
        payload_bytes=payload_bytes,
        sent_bytes=shipping.sent_bytes,
        seconds=time.monotonic() - began_s,
    )


@dataclass
class _Shipping:
    """The request to `ship`, and its progress.

    Attributes
    ----------
    lost
        How often a process or node has gone since the last portion arrived.
    """

    job: str
    source: Node
    target: Node
    ranks: int | Sequence[int] | None
    boundary: int | None
    replace: bool
    portion_bytes: int
    progress: Progress | None
    sent_bytes: int = 0
    lost: int = 0

    def finish(self) -> tuple[Held, int]:
        """Try until it is done or pointless. Return the snapshot that was shipped, and its bytes."""
        replaced = 0
        while True:
            try:
                return self._attempt()
            except NodeLostError:
                self.lost += 1
                if self.lost == _ATTEMPTS:
                    raise
            except ReplacedSnapshotError:
                replaced += 1
                if replaced == _ATTEMPTS:
                    raise

    def _attempt(self) -> tuple[Held, int]:
        """Try once, with new processes on both nodes."""
        named = {"replace": self.replace, "portion_bytes": self.portion_bytes}
        sender = actor(Sender, self.source, self.source.flags)
        receiver = actor(Receiver, self.target, self.target.flags, **named)
        try:
            held = decode(result(sender.begin.remote(self.job, self.ranks, self.boundary)), Held)
            payload_bytes = self._send(sender, receiver, held.ranks)
            result(receiver.publish.remote())
            return held, payload_bytes
        finally:
            with suppress(NodeLostError):
                result(receiver.abandon.remote())
            end(sender)
            end(receiver)

    def _send(self, sender: Any, receiver: Any, ranks: Sequence[int]) -> int:
        """Send what is missing, several portions at a time. Return the bytes of all ranks' states."""
        under_way: deque[Any] = deque(sender.offer.remote(rank) for rank in ranks)
        try:
            missing = decode(result(receiver.receive.remote(*under_way)), Missing)
            under_way.clear()
            for portion in map(encode, missing.portions):
                if len(under_way) >= _UNDER_WAY:
                    self._count(result(under_way.popleft()))
                under_way.append(receiver.put.remote(portion, sender.portion.remote(portion)))
            while under_way:
                self._count(result(under_way.popleft()))
        finally:
            settle(under_way)
        return missing.payload_bytes

    def _count(self, nbytes: int) -> None:
        self.sent_bytes += nbytes
        self.lost = 0
        if self.progress is not None:
            self.progress(nbytes)
