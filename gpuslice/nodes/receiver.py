"""The end that a snapshot goes to: writes what arrives into this node's RAM disk, and publishes it whole.

Its state is the bytes themselves. A receiver that begins again finds in the slots what an earlier one got, by
the checksums, and asks for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from gpuslice.checkpoint.format.checksums import fingerprint
from gpuslice.checkpoint.format.pieces import piece_ranges
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import CorruptSnapshotError, RamDiskFullError, RemoteProtocolError, UsageError

from .messages import PORTION_BYTES, Description, Held, Missing, Offer, Portion, decode, encode
from .sender import open_disk


@dataclass
class _Arriving:
    """A rank's snapshot on its way.

    Attributes
    ----------
    writer
        ``None`` if the very snapshot is here already.
    missing
        Which pieces have not arrived.
    """

    store: JobStore
    description: Description
    writer: SnapshotWriter | None
    sizes: list[int]
    missing: set[int]


class Receiver:
    """Takes one snapshot of a job; made in a process on the node that it goes to.

    Parameters
    ----------
    flags
        Settings of that node that its environment does not say: ``ramdisk_dir``, ``spill_dir``, ``socket``.
    replace
        Whether it takes the place of one that has come further.
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
        self._arriving: dict[int, _Arriving] = {}

    def receive(self, offer: bytes) -> bytes:
        """Make room for a rank's snapshot; what is missing of it, an encoded ``Missing``.

        Raises
        ------
        RamDiskFullError
            If there is no room; everything is as before.
        UsageError
            If the job runs here, or has a newer snapshot here.
        CorruptSnapshotError, RefusedSnapshotError
            If what was offered is no snapshot.
        """
        offered = decode(offer, Offer)
        description = Description.of(offered)
        if offered.rank in self._arriving or self._held not in (None, offered.held):
            raise RemoteProtocolError("a snapshot was offered while another one arrives")
        self._held = offered.held
        with self._giving_back():
            arriving = self._begin(offered.held, offered.rank, description)
        portions = tuple(self._portions(arriving))
        nbytes = sum(arriving.sizes[index] for index in arriving.missing)
        return encode(Missing(offered.rank, portions, nbytes, sum(arriving.sizes)))

    def _begin(self, held: Held, rank: int, description: Description) -> _Arriving:
        store = open_disk(_tenants(held) | self._flags).open_store(held.job, rank, ranks=held.ranks)
        sizes = [stop - start for start, stop in piece_ranges(description.placement)]
        arriving = self._arriving[rank] = _Arriving(store, description, None, sizes, set())
        with ExitStack() as opened:
            present = [opened.enter_context(snapshot) for snapshot in store.restartable().values()]
            self._refuse_newer(held, store, present)
            complete = _is_newest(description, present)
        if not complete:
            arriving.writer = store.begin(description.layout, share=len(held.ranks) > 1, resume=True)
            arriving.missing = set(arriving.writer.missing(description.keys))
        return arriving

    def _refuse_newer(self, held: Held, store: JobStore, present: Sequence[SnapshotFile]) -> None:
        newest = max((snapshot.boundary for snapshot in present), default=0)
        if newest > held.boundary and not self._replace:
            raise UsageError(
                f"{store.directory} has a snapshot of boundary {newest}, further on than {held.boundary}",
                "go on there, or replace it: `gpuslice ship --replace`",
            )

    def _portions(self, arriving: _Arriving) -> Iterator[tuple[int, ...]]:
        """The missing pieces in portions of the wanted size; a larger piece is one by itself."""
        portion: list[int] = []
        nbytes = 0
        for index in sorted(arriving.missing):
            if portion and nbytes + arriving.sizes[index] > self._portion_bytes:
                yield tuple(portion)
                portion, nbytes = [], 0
            portion.append(index)
            nbytes += arriving.sizes[index]
        if portion:
            yield tuple(portion)

    def put(self, header: bytes, data: bytes) -> int:
        """Take a portion: the pieces that ``header``, an encoded ``Portion``, names; returns their bytes.

        Raises
        ------
        CorruptSnapshotError
            If a piece does not have its checksum; those before it are kept.
        RamDiskFullError
            If there is no room; everything is as before the shipment.
        """
        portion = decode(header, Portion)
        arriving = self._arriving.get(portion.rank)
        if arriving is None or arriving.writer is None or not arriving.missing.issuperset(portion.pieces):
            raise RemoteProtocolError(f"pieces of rank {portion.rank} came that were not asked for")
        if type(data) is not bytes or len(data) != sum(arriving.sizes[i] for i in portion.pieces):
            raise RemoteProtocolError(f"a portion of rank {portion.rank} has another length than its pieces")
        with self._giving_back():
            _put(arriving, arriving.writer, portion.pieces, memoryview(data))
        return len(data)

    def publish(self) -> None:
        """Publish the snapshot of every rank, then remove the older ones.

        Raises
        ------
        CorruptSnapshotError
            If a byte is not what its sender's checksum table says; nothing of that rank is published.
        """
        held = self._held
        if (
            held is None
            or set(self._arriving) != set(held.ranks)
            or any(arriving.missing for arriving in self._arriving.values())
        ):
            raise RemoteProtocolError("the snapshot is not whole yet")
        with self._giving_back():
            for arriving in self._arriving.values():
                _publish(arriving)
        self._close()

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        """Where there is no room, what has arrived only stands in the way of others."""
        try:
            yield
        except RamDiskFullError:
            self._close()
            raise

    def _close(self) -> None:
        """Let go of the stores, in each of which only the newest snapshot stays."""
        for arriving in self._arriving.values():
            arriving.store.close(keep=True)
        self._arriving.clear()

    def abandon(self) -> None:
        """Let go of the stores and leave what has arrived for another attempt, as if the process had died."""
        for arriving in self._arriving.values():
            arriving.store.abandon()
        self._arriving.clear()


def _tenants(held: Held) -> dict[str, str]:
    """Settings by which the snapshot is the tenant's here, too, and its limit applies."""
    limit_bytes = held.tenant_limit_bytes
    return {"tenant": held.tenant, "tenant_ramdisk": "" if limit_bytes is None else str(limit_bytes)}


def _is_newest(description: Description, present: Sequence[SnapshotFile]) -> bool:
    """Whether the newest of these is the very snapshot, and every byte of it is right."""
    newest = max(present, key=lambda snapshot: snapshot.generation, default=None)
    if newest is None or not description.same_snapshot(newest.record):
        return False
    with suppress(CorruptSnapshotError):
        newest.verify()
        return True
    return False


def _put(arriving: _Arriving, writer: SnapshotWriter, pieces: Sequence[int], data: memoryview) -> None:
    for index in pieces:
        piece, data = data[: arriving.sizes[index]], data[arriving.sizes[index] :]
        if fingerprint(piece) != arriving.description.keys[index]:
            raise CorruptSnapshotError(
                f"piece {index} of rank {arriving.store.rank} is not what was sent",
                "send it again: `gpuslice ship` goes on with what has not arrived",
            )
        writer.put(index, piece)
        arriving.missing.discard(index)


def _publish(arriving: _Arriving) -> None:
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
