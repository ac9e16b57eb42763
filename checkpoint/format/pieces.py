"""A snapshot file in pieces: parts of its payload lie in separate files that other snapshots may share.

What is left of the file is the *rest*: header, tail and record, followed by the pieces' keys and a trailer.
The pieces put between header and tail give the GSNP/2 file again, byte for byte. So every reader of one form
reads the other (docs/snapshot-format.md, section 9).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from gpuslice.checkpoint.files import read_at
from gpuslice.errors import CorruptSnapshotError

from .checksums import digest, fingerprint
from .gsnp import FILE_LIMIT_BYTES, RECORD_BYTES
from .layout import CHUNK_BYTES, LARGE_BYTES, PAGE_BYTES, Placement, align

#: Small storages are cut into pieces of this size, so that a change in one prevents few others from sharing.
SMALL_PIECE_BYTES = 64 << 10
KEY_BYTES = 16
TRAILER_BYTES = PAGE_BYTES
TRAILER_MAGIC = b"GSNPcut\n"
_TRAILER = struct.Struct("<8sQQ16s")


class Piece(NamedTuple):
    """Whole pages of a payload: the key that names their file, and their range in the whole file."""

    key: bytes
    start: int
    stop: int


def piece_ranges(placement: Placement) -> tuple[tuple[int, int], ...]:
    """Return start and end of every piece of a payload: whole pages without a gap.

    Large storages are cut where their checksummed chunks begin, the region of small ones every 64 KiB.
    """
    ranges: list[tuple[int, int]] = []
    at = placement.extents[0][0] if placement.extents else placement.end
    for start, stop in placement.extents:
        if (stop - start) % PAGE_BYTES or stop - start < LARGE_BYTES:
            break
        ranges += [(cut, min(cut + CHUNK_BYTES, stop)) for cut in range(start, stop, CHUNK_BYTES)]
        at = stop
    step = SMALL_PIECE_BYTES
    return (*ranges, *((cut, min(cut + step, placement.end)) for cut in range(at, placement.end, step)))


def keys_and_trailer(cut_bytes: int, keys: Sequence[bytes]) -> bytes:
    """Return the end of a rest, which follows the record: the pieces' keys, and the trailer."""
    joined = b"".join(keys)
    page = _TRAILER.pack(TRAILER_MAGIC, cut_bytes, len(keys), fingerprint(joined))
    page = page.ljust(TRAILER_BYTES - 8, b"\0")
    return joined.ljust(align(len(joined), PAGE_BYTES), b"\0") + page + struct.pack("<Q", digest(page))


class FileParts:
    """A reader of an open snapshot file: a whole one, or the part that is left without its pieces (a *rest*).

    If it is a rest, ``cut_bytes`` of its payload lie in pieces with these ``keys``; else 0 and none.
    """

    def __init__(self, descriptor: int, payload: int) -> None:
        self.descriptor = descriptor
        self._payload = payload
        self.length, self.cut_bytes = os.fstat(descriptor).st_size, 0
        self.keys: tuple[bytes, ...] = ()
        page = read_at(descriptor, TRAILER_BYTES, max(0, self.length - TRAILER_BYTES))
        if page.startswith(TRAILER_MAGIC):  # no whole file ends with it
            self._read_trailer(page)

    def _read_trailer(self, page: bytes) -> None:
        present = self.length
        _, cut_bytes, count, expected = _TRAILER.unpack_from(page)
        if page[-8:] != struct.pack("<Q", digest(page[:-8])):
            raise CorruptSnapshotError(f"the file has {present} bytes: it was truncated")
        room = align(KEY_BYTES * count, PAGE_BYTES)
        end = present - TRAILER_BYTES - room
        if cut_bytes > FILE_LIMIT_BYTES or cut_bytes % PAGE_BYTES or end < self._payload + RECORD_BYTES:
            raise CorruptSnapshotError("the trailer of its pieces makes no sense")
        keys = read_at(self.descriptor, room, end)
        if fingerprint(keys[: KEY_BYTES * count]) != expected or any(keys[KEY_BYTES * count :]):
            raise CorruptSnapshotError("the keys of its pieces are damaged")
        self.length, self.cut_bytes = end + cut_bytes, cut_bytes
        self.keys = tuple(keys[at : at + KEY_BYTES] for at in range(0, KEY_BYTES * count, KEY_BYTES))

    def read(self, length: int, position: int) -> bytes:
        """Return bytes of header, tail or record."""
        here = position if position < self._payload else position - self.cut_bytes
        return read_at(self.descriptor, length, here)


def check_pieces(keys: Sequence[bytes], placement: Placement) -> list[Piece]:
    """Return a payload's pieces, given their keys. Raise ``CorruptSnapshotError`` if the number is wrong."""
    ranges = piece_ranges(placement)
    if len(ranges) != len(keys):
        raise CorruptSnapshotError(f"it names {len(keys)} pieces, its payload has {len(ranges)}")
    return [Piece(key, start, stop) for key, (start, stop) in zip(keys, ranges, strict=True)]
