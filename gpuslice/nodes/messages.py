"""Messages between the two ends of a shipment: bytes, checked on arrival.

Ray pickles what it carries, except plain ``bytes``. So each message is encoded here, and a snapshot's content
is only ever bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from gpuslice.checkpoint.format.checksums import Digests
from gpuslice.checkpoint.format.gsnp import RECORD_BYTES, Record
from gpuslice.checkpoint.format.layout import Layout
from gpuslice.checkpoint.format.pieces import KEY_BYTES, check_pieces
from gpuslice.checkpoint.format.reader import read_description
from gpuslice.checkpoint.format.safetensors_header import PREAMBLE_BYTES, Content, decode_preamble
from gpuslice.errors import CorruptSnapshotError, RemoteProtocolError
from gpuslice.types import ByteCount, Count, JobName, Label, RankNumber, explain

#: Bytes sent at a time, unless a piece is larger.
PORTION_BYTES = 8 << 20

_M = TypeVar("_M", bound=msgspec.Struct)


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest whole snapshot of a job on a node.

    Attributes
    ----------
    boundary
        The boundary at which all of these ranks have a snapshot.
    generation
        How many snapshots the first rank has taken in this store.
    ranks
        The ranks whose snapshots are here.
    tenant, tenant_limit_bytes
        The job's tenant, empty without one, and the limit of the tenant's jobs in a RAM disk, if any.
    """

    job: JobName
    boundary: Count
    generation: Count
    ranks: Annotated[tuple[RankNumber, ...], Meta(min_length=1)]
    tenant: Label = ""
    tenant_limit_bytes: ByteCount | None = None


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's snapshot without its payload.

    Attributes
    ----------
    held
        The job's snapshot that it belongs to.
    head, tail
        The file up to its payload, and behind it up to the end of the record.
    keys
        The XXH3-128 of each piece of the payload, one behind the other.
    """

    held: Held
    rank: RankNumber
    head: bytes
    tail: bytes
    keys: bytes


class Portion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some pieces of a rank's payload; their bytes go beside it, one piece behind the other."""

    rank: RankNumber
    pieces: Annotated[tuple[Count, ...], Meta(min_length=1)]


class Missing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of a snapshot that the receiver lacks.

    Attributes
    ----------
    portions
        The pieces, as they shall come; one that several ranks lack is named once.
    payload_bytes
        How many bytes all pieces of all ranks have, those included that are there.
    missing_bytes
        How many bytes are to come.
    """

    portions: tuple[Portion, ...]
    payload_bytes: ByteCount
    missing_bytes: ByteCount


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[_M]) -> _M:
    """Return the message. Raise ``RemoteProtocolError`` if it is not of that kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"the other node sent no {kind.__name__}: {explain(error)}") from error


@dataclass(frozen=True)
class Description:
    """The content of an offer, checked like a snapshot's file when it is opened.

    ``pieces`` are the payload's, in order, by checksum and length.
    """

    record: Record
    content: Content
    tree: bytes
    digests: Digests
    pieces: list[tuple[bytes, int]]

    @property
    def layout(self) -> Layout:
        """Storages of the snapshot."""
        return self.content.layout

    @property
    def keys(self) -> list[bytes]:
        """Checksums of the pieces."""
        return [key for key, _ in self.pieces]

    @classmethod
    def of(cls, offer: Offer) -> Description:
        """Return the checked content of an offer.

        ``CorruptSnapshotError`` or ``RefusedSnapshotError`` if it is no snapshot.
        """
        payload, position = decode_preamble(offer.head[:PREAMBLE_BYTES])
        record = Record.decode(offer.tail[-RECORD_BYTES:])
        lengths = (len(offer.head), record.tail + len(offer.tail) - RECORD_BYTES)
        if (record.payload, record.position) != (payload, position) or lengths != (payload, position):
            raise CorruptSnapshotError("the parts of the snapshot that was sent do not fit together")
        if (record.job, record.rank) != (offer.held.job, offer.rank) or not record.restartable:
            raise CorruptSnapshotError("the snapshot that was sent is not the one that was announced")
        if record.boundary != offer.held.boundary or offer.rank not in offer.held.ranks:
            raise CorruptSnapshotError("the snapshot that was sent is not the one that was announced")

        def read(length: int, at: int) -> bytes:
            return offer.head[at : at + length] if at < payload else offer.tail[at - record.tail :][:length]

        content, tree, digests = read_description(read, record)
        found = range(0, len(offer.keys), KEY_BYTES)
        keys = [offer.keys[at : at + KEY_BYTES] for at in found]
        pieces = check_pieces(keys, content.placement)
        return cls(record, content, tree, digests, [(key, stop - start) for key, start, stop in pieces])

    def same_snapshot(self, record: Record) -> bool:
        """Return True if a snapshot with that record, in another store, has the same checksums."""
        mine = self.record
        return (
            (mine.boundary, mine.payload, mine.tail, mine.metadata_len, mine.restartable)
            == (record.boundary, record.payload, record.tail, record.metadata_len, record.restartable)
            and mine.metadata_xxh3 == record.metadata_xxh3
            and mine.table_xxh3 == record.table_xxh3
        )
