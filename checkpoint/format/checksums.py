"""xxh3 of chunks: every byte lies in one, and is read once, if possible by the thread that copies it.

A `ChecksumRecorder` watches a copy into an arena: it notes the checksums that the snapshot will
carry, and skips chunks that have not changed since the arena's last snapshot. A `ChecksumVerifier` watches
the copy back.
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
#: For each so many bytes one more thread is worth starting.
_THREAD_BYTES = 8 << 20

#: xxh3-64 of each chunk.
Digests = list[int]


def fingerprint(data: bytes | memoryview) -> bytes:
    """xxh3-128 of header, metadata or table: 16 bytes, most significant first."""
    return xxh3_128_digest(data)


def digest(data: bytes | memoryview) -> int:
    """xxh3-64 of a chunk."""
    return xxh3_64_intdigest(data)


def pack_digests(digests: Digests) -> bytes:
    """Digests as little-endian u64, the form they have in the file."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(table: bytes, count: int) -> Digests:
    """The first ``count`` digests of a checksum table."""
    return list(struct.unpack_from(f"<{count}Q", table))


def chunk_digests(data: memoryview, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """xxh3-64 of each range of ``data``; xxhash lets go of the GIL meanwhile."""
    found: dict[tuple[int, int], int] = {}

    def look(piece: tuple[int, int]) -> None:
        found[piece] = digest(data[slice(*piece)])

    nbytes = sum(stop - start for start, stop in ranges)
    run([[piece] for piece in ranges], look, min(nbytes // _THREAD_BYTES, len(os.sched_getaffinity(0))))
    return [found[piece] for piece in ranges]


@dataclass(frozen=True, slots=True)
class ArenaChecksums:
    """What an arena still holds of its last snapshot: XXH3-128 by chunk, ``None`` where nobody took it."""

    placement: Placement
    sums: tuple[int | None, ...]


class ChecksumRecorder:
    """Inspector of a copy into ``memory``, and its `Checksums`.

    The host and a GPU hash every byte where it comes from, so a copy that went wrong shows when it is taken
    back. A chunk is skipped only if 128 bits of hash say that the arena has it: version counters of tensors
    do not see what NumPy, ``.data`` or a C extension write.
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
        """Take a chunk's checksum, and write its padding; whether the last snapshot had the same there."""
        index = self._placement.chunk_at[offset]
        padding = self.padded(offset) - nbytes
        if padding:
            self._memory[offset + nbytes : offset + nbytes + padding] = _ZEROS[:padding]
        self._sums[index] = checksum
        return self._previous.sums[index] == checksum

    def sum_at(self, offset: int) -> int:
        """XXH3-128 of the chunk that begins there and was seen on its way, its padding included."""
        value = self._sums[self._placement.chunk_at[offset]]
        assert value is not None
        return value

    def arena_checksums(self) -> ArenaChecksums:
        """What the arena holds now, for its next snapshot."""
        return ArenaChecksums(self._placement, tuple(self._sums))

    def digests(self) -> Digests:
        """XXH3-64 of every chunk; those that were not seen on their way are read from the arena.

        It is the lower half of XXH3-128, for everything longer than 240 bytes; no chunk is shorter than 256.
        """
        chunks = zip(self._placement.chunks, self._sums, strict=True)
        unseen = iter(chunk_digests(self._memory, [chunk for chunk, value in chunks if value is None]))
        return [next(unseen) if value is None else value & _LOWER_HALF for value in self._sums]


class ChecksumVerifier:
    """Inspector of a copy out of ``memory``; also as `Checksums`. Every chunk must be as it was written.

    ``corrupt`` makes the error for a damaged chunk from its offset.
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
        """Compare a chunk's checksum; nothing is there already."""
        self._compare(offset, checksum & _LOWER_HALF)
        return False

    def _compare(self, offset: int, found: int) -> None:
        if found != self._expected[self._placement.chunk_at[offset]]:
            raise self._corrupt(offset)
