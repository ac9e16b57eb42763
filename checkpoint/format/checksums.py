"""Checksums (xxh3) of chunks. Every byte lies in one chunk and is read once, if possible as it is copied.

A `ChecksumRecorder` watches a copy into an arena. It notes the checksums that the snapshot will have, and
skips chunks that have not changed since the arena's last snapshot. A `ChecksumVerifier` watches the copy
back.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest, xxh3_128_intdigest

from gpuslice.errors import SnapshotError
from gpuslice.kernels.host.copies import run

from .layout import PAGE_BYTES, Placement

_ZEROS = bytes(2 * PAGE_BYTES)
_LOWER_HALF = (1 << 64) - 1
#: One more thread is worth starting for each this many bytes.
_THREAD_BYTES = 8 << 20

#: The xxh3-64 of each chunk.
Digests = list[int]


def fingerprint(data: bytes | memoryview) -> bytes:
    """Return the xxh3-128 of header, metadata or table: 16 bytes, most significant first."""
    return xxh3_128_digest(data)


def digest(data: bytes | memoryview) -> int:
    """Return the xxh3-64 of a chunk."""
    return xxh3_64_intdigest(data)


def pack_digests(digests: Digests) -> bytes:
    """Return digests as little-endian u64, the form that they have in the file."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(table: bytes, count: int) -> Digests:
    """Return the first ``count`` digests of a checksum table."""
    return list(struct.unpack_from(f"<{count}Q", table))


def chunk_digests(data: memoryview, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the xxh3-64 of each range of ``data``. xxhash releases the GIL meanwhile."""
    found: dict[tuple[int, int], int] = {}

    def look(piece: tuple[int, int]) -> None:
        found[piece] = digest(data[slice(*piece)])

    nbytes = sum(stop - start for start, stop in ranges)
    run([[piece] for piece in ranges], look, min(nbytes // _THREAD_BYTES, len(os.sched_getaffinity(0))))
    return [found[piece] for piece in ranges]


@dataclass(frozen=True, slots=True)
class ArenaChecksums:
    """The XXH3-128 of each chunk of an arena's last snapshot; None for a chunk without one."""

    placement: Placement
    sums: tuple[int | None, ...]


class ChecksumRecorder:
    """The inspector of a copy into ``memory``: records each chunk's checksum (see `Checksums`).

    The host and a GPU hash every byte at its source, so a bad copy is detected when it is copied back. A
    chunk is skipped only if 128 bits of hash say that the arena has it: version counters of tensors do not
    see writes by NumPy, ``.data`` or a C extension.
    """

    def __init__(self, memory: memoryview, placement: Placement, previous: ArenaChecksums | None) -> None:
        self._memory = memory
        self._placement, self.padded = placement, placement.padded
        unknown = (None,) * placement.chunk_total
        if previous is None or previous.placement != placement:
            previous = ArenaChecksums(placement, unknown)
        self._previous = previous
        self._sums: list[int | None] = [*unknown]

    def __call__(self, offset: int, data: memoryview) -> bool:
        padding = self.padded(offset) - len(data)
        if padding:
            state = xxh3_128(data)
            state.update(_ZEROS[:padding])
            value = state.intdigest()
        else:
            value = xxh3_128_intdigest(data)
        return not self.note(offset, len(data), value)

    def note(self, offset: int, nbytes: int, checksum: int) -> bool:
        """Take a chunk's checksum, and write its padding. Return True if the chunk has not changed."""
        index = self._placement.chunk_at[offset]
        padding = self.padded(offset) - nbytes
        if padding:
            self._memory[offset + nbytes : offset + nbytes + padding] = _ZEROS[:padding]
        self._sums[index] = checksum
        return self._previous.sums[index] == checksum

    def sum_at(self, offset: int) -> int:
        """Return the XXH3-128 of an inspected chunk, padding included."""
        value = self._sums[self._placement.chunk_at[offset]]
        assert value is not None
        return value

    def arena_checksums(self) -> ArenaChecksums:
        """Return the checksums of the arena's present content, for the next snapshot."""
        return ArenaChecksums(self._placement, tuple(self._sums))

    def digests(self) -> Digests:
        """Return the XXH3-64 of every chunk. Chunks that were not inspected are read from the arena.

        The XXH3-64 is the lower half of the XXH3-128 for inputs longer than 240 bytes; no chunk is shorter
        than 256.
        """
        chunks = zip(self._placement.chunks, self._sums, strict=True)
        unseen = iter(chunk_digests(self._memory, [chunk for chunk, value in chunks if value is None]))
        return [next(unseen) if value is None else value & _LOWER_HALF for value in self._sums]


class ChecksumVerifier:
    """The inspector of a copy out of ``memory``: every chunk must have its recorded checksum.

    ``corrupt`` returns the error for a damaged chunk, given its offset.
    """

    def __init__(
        self,
        memory: memoryview,
        placement: Placement,
        digests: Digests,
        corrupt: Callable[[int], SnapshotError],
    ) -> None:
        self._memory = memory
        self._placement, self.padded = placement, placement.padded
        self._expected = digests
        self._corrupt = corrupt

    def __call__(self, offset: int, data: memoryview) -> bool:
        # The padding, which belongs to the chunk, is not part of the data.
        self._compare(offset, digest(self._memory[offset : offset + self.padded(offset)]))
        return True

    def note(self, offset: int, nbytes: int, checksum: int) -> bool:
        """Compare a chunk's checksum. Return False: every chunk has to be copied."""
        self._compare(offset, checksum & _LOWER_HALF)
        return False

    def _compare(self, offset: int, found: int) -> None:
        if found != self._expected[self._placement.chunk_at[offset]]:
            raise self._corrupt(offset)
