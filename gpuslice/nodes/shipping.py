"""Ship a job's newest whole snapshot from one node's RAM disk to another's.

The calling process has a sender on one node and a receiver on the other, and passes references from the first
to the second. With Ray it holds no bytes: Ray's object stores move them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from gpuslice.errors import NodeLostError, ReplacedSnapshotError, StateGoneError, UsageError

from .messages import PORTION_BYTES, Held, Missing, decode, encode
from .ray_nodes import Node, RayCarrier
from .routes import Boundaries, choose

#: Portions under way at a time: one is read, one moved, one written, and one is spare.
_UNDER_WAY = 4
#: Number of attempts without any arrival, and of attempts while newer snapshots replace the chosen one.
_ATTEMPTS = 3

#: Called with the bytes that have arrived and the bytes of all ranks' states, whenever that changes.
Progress = Callable[[int, int], object]


class Carrier(Protocol):
    """What reaches the two ends of a shipment, and moves bytes between them.

    A method of an end is begun by ``end.method.remote(...)``, which returns a reference; a reference may be
    an argument of another.
    """

    def sender(self, node: Node) -> Any:
        """Return an end like ``Sender`` in a process on ``node``."""
        ...

    def receiver(self, node: Node, *, replace: bool, portion_bytes: int) -> Any:
        """Return an end like ``Receiver`` in a process on ``node``."""
        ...

    def result(self, reference: Any) -> Any:
        """Return what a method has returned, or raise what it has raised."""
        ...

    def settle(self, references: Iterable[Any]) -> None:
        """Wait for methods whose results are no longer needed."""
        ...

    def end(self, handle: Any) -> None:
        """End the process of an end."""
        ...


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
    carrier: Carrier | None = None,
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
        Called with the bytes of all ranks' states that are at the target, and how many these are to be.
    carrier
        What moves it; by default Ray.

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
    by = RayCarrier() if carrier is None else carrier
    shipping = _Shipping(by, job, source, target, ranks, boundary, replace, portion_bytes, progress)
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

    carrier: Carrier
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
    _to_come_bytes: int = 0

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
        carrier = self.carrier
        sender = carrier.sender(self.source)
        receiver = carrier.receiver(self.target, replace=self.replace, portion_bytes=self.portion_bytes)
        try:
            held = decode(carrier.result(sender.begin.remote(self.job, self.ranks, self.boundary)), Held)
            payload_bytes = self._send(sender, receiver, held.ranks)
            carrier.result(receiver.publish.remote())
            return held, payload_bytes
        finally:
            with suppress(NodeLostError):
                carrier.result(receiver.abandon.remote())
            carrier.end(sender)
            carrier.end(receiver)

    def _send(self, sender: Any, receiver: Any, ranks: Sequence[int]) -> int:
        """Send what is missing, several portions at a time. Return the bytes of all ranks' states."""
        under_way: deque[Any] = deque(sender.offer.remote(rank) for rank in ranks)
        try:
            missing = decode(self.carrier.result(receiver.receive.remote(*under_way)), Missing)
            under_way.clear()
            self._count(0, missing)
            for portion in map(encode, missing.portions):
                if len(under_way) >= _UNDER_WAY:
                    self._count(self.carrier.result(under_way.popleft()), missing)
                under_way.append(receiver.put.remote(portion, sender.portion.remote(portion)))
            while under_way:
                self._count(self.carrier.result(under_way.popleft()), missing)
        finally:
            self.carrier.settle(under_way)
        return missing.payload_bytes

    def _count(self, nbytes: int, missing: Missing) -> None:
        """Count ``nbytes`` that have arrived of what was ``missing``; 0: nothing has arrived yet."""
        self.sent_bytes += nbytes
        self._to_come_bytes = self._to_come_bytes - nbytes if nbytes else missing.missing_bytes
        self.lost = 0 if nbytes else self.lost
        if self.progress is not None:
            self.progress(missing.payload_bytes - self._to_come_bytes, missing.payload_bytes)


def bring(
    job: str,
    targets: Sequence[str],
    there: Mapping[str, Node],
    held: Mapping[str, Boundaries],
    carrier: Carrier | None = None,
    progress: Progress | None = None,
) -> None:
    """Bring the newest whole snapshot of ``job`` to its ranks' nodes, from wherever each rank's lies.

    Parameters
    ----------
    targets
        Where each rank's is to be.
    there
        The living nodes, by name.
    held
        What they have.
    carrier, progress
        As for ``ship``. The bytes are those of all ways that were begun so far.

    Raises
    ------
    StateGoneError
        If no node has one.
    """
    if (routes := choose(held, targets)) is None:
        raise StateGoneError(f"no living node has a whole snapshot of {job}", "replicate it, see nodes.md")
    before = 0
    for (source, target), ranks in routes.ways.items():
        shipment = ship(
            *(job, there[source], there[target]),
            ranks=ranks,
            boundary=routes.boundary,
            replace=True,
            carrier=carrier,
            progress=None if progress is None else partial(_beyond, progress, before),
        )
        before += shipment.payload_bytes


def _beyond(progress: Progress, before: int, arrived: int, payload: int) -> None:
    """Tell ``progress`` of a way before which states of ``before`` bytes were brought."""
    progress(before + arrived, before + payload)
