"""The receiving end of a shipment: writes pieces into this node's RAM disk, and publishes the snapshot.

Its only state is the bytes themselves. A new receiver finds what an earlier one got in the slots, by the
checksums, and asks for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from gpuslice.checkpoint.format.checksums import fingerprint
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import CorruptSnapshotError, RamDiskFullError, RemoteProtocolError, UsageError

from .messages import PORTION_BYTES, Description, Held, Missing, Offer, Portion, decode, encode
from .sender import open_disk

#: Least part of a job's bytes that must be equal on its ranks for them to share pieces here.
_WORTH_SHARING = 1 / 8


@dataclass
class _IncomingSnapshot:
    """A rank's snapshot that is being received.

    Attributes
    ----------
    writer
        ``None`` if the very snapshot is here already.
    published
        True if it is whole here.
    """

    store: JobStore
    description: Description
    writer: SnapshotWriter | None = None
    published: bool = False


class Receiver:
    """Receives one snapshot of a job; made in a process on the node that it goes to.

    Parameters
    ----------
    flags
        Settings of that node that its environment does not say: ``ramdisk_dir``, ``spill_dir``, ``socket``.
    replace
        True to replace a later snapshot.
    portion_bytes
        What shall be sent at a time.
    """

    def __init__(
        self, flags: Mapping[str, str], *, replace: bool = False, portion_bytes: int = PORTION_BYTES
    ) -> None:
        self._flags = dict(flags)
        self._replace = replace
        self._portion_bytes = portion_bytes
        self._held: Held | None = None
        self._arriving: dict[int, _IncomingSnapshot] = {}
        #: Missing pieces, by checksum and length: the writers that need them, and their numbers there.
        self._wanted: dict[tuple[bytes, int], list[tuple[SnapshotWriter, int, int]]] = {}

    def receive(self, *offers: bytes) -> bytes:
        """Make room for the snapshot of every rank. Return what is missing, an encoded ``Missing``.

        Raises
        ------
        RamDiskFullError
            If there is no room; everything is as before.
        UsageError
            If the job runs here, or has a newer snapshot here.
        CorruptSnapshotError, RefusedSnapshotError
            If what was offered is no snapshot.
        """
        if self._held is not None:
            raise RemoteProtocolError("a snapshot was offered while another one arrives")
        held, described = _described(offers)
        self._held = held
        share = _are_alike(described.values())
        with self._release_when_full():
            for rank, description in described.items():
                self._begin(held, rank, description, share=share)
        nbytes = sum(size for description in described.values() for _, size in description.pieces)
        missing_bytes = sum(size for _, size in self._wanted)
        return encode(Missing(tuple(self._portions()), nbytes, missing_bytes))

    def _begin(self, held: Held, rank: int, description: Description, *, share: bool) -> None:
        store = open_disk(_tenants(held) | self._flags).open_store(held.job, rank, ranks=held.ranks)
        arriving = self._arriving[rank] = _IncomingSnapshot(store, description)
        with ExitStack() as opened:
            present = [opened.enter_context(snapshot) for snapshot in store.restartable().values()]
            self._refuse_newer(held, store, present)
            if _is_newest(description, present):
                arriving.published = True
                return
            writer = arriving.writer = store.begin(description.layout, share=share, resume=True)
            for snapshot in [] if share else present:
                writer.copy_equal(snapshot, description.digests)
        for index in writer.missing(description.keys):
            self._wanted.setdefault(description.pieces[index], []).append((writer, rank, index))

    def _refuse_newer(self, held: Held, store: JobStore, present: Sequence[SnapshotFile]) -> None:
        newest = max((snapshot.boundary for snapshot in present), default=0)
        if newest > held.boundary and not self._replace:
            raise UsageError(
                f"{store.directory} has a snapshot of boundary {newest}, further on than {held.boundary}",
                "go on there, or replace it: `gpuslice ship --replace`",
            )

    def _portions(self) -> Iterator[Portion]:
        """Yield the wanted pieces in portions of the wanted size, each of one rank only.

        A larger piece is a portion by itself.
        """
        portion: list[int] = []
        nbytes, last = 0, -1
        for (_, size), ((_, rank, index), *_) in self._wanted.items():
            if portion and (rank != last or nbytes + size > self._portion_bytes):
                yield Portion(last, tuple(portion))
                portion, nbytes = [], 0
            portion.append(index)
            nbytes, last = nbytes + size, rank
        if portion:
            yield Portion(last, tuple(portion))

    def put(self, header: bytes, data: bytes) -> int:
        """Take a portion: the pieces named by ``header``, an encoded ``Portion``. Return their bytes.

        Raises
        ------
        CorruptSnapshotError
            If a piece does not have its checksum; those before it are kept.
        RamDiskFullError
            If there is no room; everything is as before the shipment.
        """
        portion = decode(header, Portion)
        arriving = self._arriving.get(portion.rank)
        known = arriving.description.pieces if arriving is not None else []
        pieces = [known[index] for index in portion.pieces if index < len(known)]
        if len(pieces) < len(portion.pieces) or not self._wanted.keys() >= set(pieces):
            raise RemoteProtocolError(f"pieces of rank {portion.rank} came that were not asked for")
        if type(data) is not bytes or len(data) != sum(size for _, size in pieces):
            raise RemoteProtocolError(f"a portion of rank {portion.rank} has another length than its pieces")
        with self._release_when_full():
            self._put(portion, pieces, memoryview(data))
        return len(data)

    def _put(self, portion: Portion, pieces: Sequence[tuple[bytes, int]], data: memoryview) -> None:
        """Give each piece to all ranks that have it."""
        for named, (key, size) in zip(portion.pieces, pieces, strict=True):
            piece, data = data[:size], data[size:]
            if fingerprint(piece) != key:
                raise CorruptSnapshotError(
                    f"piece {named} of rank {portion.rank} is not what was sent",
                    "send it again: `gpuslice ship` goes on with what has not arrived",
                )
            for writer, _, index in self._wanted.pop((key, size), ()):
                writer.put(index, piece)

    def publish(self) -> None:
        """Publish the snapshot of every rank, then remove the older ones.

        Raises
        ------
        CorruptSnapshotError
            If a byte is not what its sender's checksum table says; nothing of that rank is published.
        """
        held = self._held
        if held is None or set(self._arriving) != set(held.ranks) or self._wanted:
            raise RemoteProtocolError("the snapshot is not whole yet")
        with self._release_when_full():
            for arriving in self._arriving.values():
                _publish(arriving)
        self._close()

    @contextmanager
    def _release_when_full(self) -> Iterator[None]:
        """Release the received parts if the block runs out of room: they would only block others.

        A rank that has the whole snapshot keeps its older one, too, as the others may have no newer one.
        """
        try:
            yield
        except RamDiskFullError:
            for arriving in self._arriving.values():
                if arriving.published:
                    arriving.store.abandon()
            self._close()
            raise

    def _close(self) -> None:
        """Release the stores, in each of which only the newest snapshot stays."""
        for arriving in self._arriving.values():
            arriving.store.close(keep=True)
        self._arriving.clear()
        self._wanted.clear()

    def abandon(self) -> None:
        """Release the stores, and leave what was received for another attempt, as if the process had died."""
        for arriving in self._arriving.values():
            arriving.store.abandon()
        self._arriving.clear()
        self._wanted.clear()


def _tenants(held: Held) -> dict[str, str]:
    """Return settings with the snapshot's tenant, so that the tenant's limit holds on this node, too."""
    limit_bytes = held.tenant_limit_bytes
    return {"tenant": held.tenant, "tenant_ramdisk": "" if limit_bytes is None else str(limit_bytes)}


def _described(offers: Iterable[bytes]) -> tuple[Held, dict[int, Description]]:
    """Return the checked description of what was offered of each rank."""
    offered = [decode(offer, Offer) for offer in offers]
    described = {one.rank: Description.of(one) for one in offered}
    held = {one.held for one in offered}
    if {frozenset(one.ranks) for one in held} != {frozenset(described)} or len(held) != 1:
        raise RemoteProtocolError("what was offered is not one snapshot with all its ranks")
    return held.pop(), described


def _are_alike(descriptions: Iterable[Description]) -> bool:
    """Return True if enough is equal on several ranks that pieces should be kept once, each in a file."""
    pieces = [piece for description in descriptions for piece in set(description.pieces)]
    total, distinct = (sum(size for _, size in some) for some in (pieces, set(pieces)))
    return total - distinct >= total * _WORTH_SHARING


def _is_newest(description: Description, present: Sequence[SnapshotFile]) -> bool:
    """Return True if the newest of these snapshots is this one, and all of its bytes are right."""
    newest = max(present, key=lambda snapshot: snapshot.generation, default=None)
    if newest is None or not description.same_snapshot(newest.record):
        return False
    with suppress(CorruptSnapshotError):
        newest.verify()
        return True
    return False


def _publish(arriving: _IncomingSnapshot) -> None:
    description, writer = arriving.description, arriving.writer
    if writer is None:
        return
    record = description.record
    writer.publish(
        description.tree,
        description.content.tensors,
        boundary=record.boundary,
        restartable=record.restartable,
        expected=description.digests,
    )
    arriving.published = True
