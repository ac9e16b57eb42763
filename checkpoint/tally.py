"""Checksums taken while a copy is under way, chunk by chunk, by whichever thread copies the chunk.

A `Tally` watches a copy into an arena: it notes the checksums that the snapshot will carry, and lets chunks
be that have not changed since the arena's last snapshot. A `Proof` watches the copy back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from xxhash import xxh3_128, xxh3_128_intdigest

from gpuslice.errors import SnapshotError

from .checksum import chunk_digests, digest, storage_digest
from .layout import CHUNK_BYTES, LARGE_BYTES, PAGE_BYTES, Placement, align, chunk_count, chunks

#: The lower half of XXH3-128 is XXH3-64, for everything longer than 240 bytes; chunks are whole pages.
_LOWER_HALF = (1 << 64) - 1
_ZEROS = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Pieces:
    """What lies at an offset of the arena.

    Attributes
    ----------
    chunk_at
        Start of a large storage's chunk -> its position in the chunk table.
    small_at
        Start of a small storage -> its number.
    """

    chunk_at: dict[int, int]
    small_at: dict[int, int]

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, sizes: tuple[int, ...], placement: Placement) -> Pieces:
        """The pieces of a layout; jobs suspend the same one again and again."""
        chunk_at: dict[int, int] = {}
        small_at: dict[int, int] = {}
        for sid, (nbytes, offset) in enumerate(zip(sizes, placement.offsets, strict=True)):
            if nbytes >= LARGE_BYTES:
                first = placement.first_chunk[sid]
                for number in range(chunk_count(nbytes)):
                    chunk_at[offset + number * CHUNK_BYTES] = first + number
            elif nbytes:
                small_at[offset] = sid
        return cls(chunk_at, small_at)


@dataclass(frozen=True, slots=True)
class Residue:
    """What an arena still holds of its last snapshot, by chunk; ``None`` where not known.

    Attributes
    ----------
    chunks
        XXH3-128.
    marks
        Those that a GPU made (``kernels.copying.Marks``); never compared with anything else.
    """

    placement: Placement
    chunks: tuple[int | None, ...]
    marks: tuple[int | None, ...]


class Tally:
    """Inspector of a copy into ``memory``.

    On the host every byte is hashed where it comes from, so a copy that went wrong shows when it is taken
    back. A chunk is let be only if 128 bits of hash say that the arena has it already: version counters of
    tensors do not see what NumPy, ``.data`` or a C extension write.
    """

    def __init__(
        self, memory: memoryview, sizes: tuple[int, ...], placement: Placement, residue: Residue | None
    ) -> None:
        self._memory = memory
        self._sizes = sizes
        self._placement = placement
        self._pieces = Pieces.of(sizes, placement)
        total = len(list(chunks(placement.extents)))
        if residue is None or residue.placement != placement:
            residue = Residue(placement, (None,) * total, (None,) * total)
        self._before = residue
        self._chunks: list[int | None] = [None] * total
        self._marks: list[int | None] = [None] * total
        self._small: dict[int, int] = {}

    def __call__(self, offset: int, data: memoryview) -> bool:
        index = self._pieces.chunk_at.get(offset)
        if index is None:
            self._small[self._pieces.small_at[offset]] = digest(data)
            return True
        padding = -len(data) % PAGE_BYTES
        if padding:
            state = xxh3_128(data)
            state.update(_ZEROS[:padding])
            value = state.intdigest()
            end = offset + len(data)
            self._memory[end : end + padding] = _ZEROS[:padding]
        else:
            value = xxh3_128_intdigest(data)
        self._chunks[index] = value
        return self._before.chunks[index] != value

    def marked(self, offset: int, mark: int) -> bool:
        """A GPU's mark of a chunk: if the last snapshot's had the same, so has it the same checksum."""
        index = self._pieces.chunk_at.get(offset)
        if index is None:
            return False
        self._marks[index] = mark
        if self._before.marks[index] != mark or self._before.chunks[index] is None:
            return False
        self._chunks[index] = self._before.chunks[index]
        return True

    def residue(self) -> Residue:
        """What the arena holds now, for its next snapshot."""
        return Residue(self._placement, tuple(self._chunks), tuple(self._marks))

    def digests(self) -> tuple[list[int], list[int]]:
        """Chunk digests and storage digests; what was not seen on its way is read from the arena."""
        ranges = list(chunks(self._placement.extents))
        unseen = [index for index, value in enumerate(self._chunks) if value is None]
        read = dict(zip(unseen, chunk_digests(self._memory, [ranges[i] for i in unseen]), strict=True))
        by_chunk = [
            read[index] if value is None else value & _LOWER_HALF for index, value in enumerate(self._chunks)
        ]
        by_storage = []
        for sid, (nbytes, offset) in enumerate(zip(self._sizes, self._placement.offsets, strict=True)):
            seen = self._small.get(sid)
            if seen is None:
                first = self._placement.first_chunk[sid]
                seen = storage_digest(
                    self._memory, nbytes, offset, by_chunk[first : first + chunk_count(nbytes)]
                )
            by_storage.append(seen)
        return by_chunk, by_storage


class Proof:
    """Inspector of a copy out of ``memory``: every chunk must have the checksum that it was written with.

    Parameters
    ----------
    corrupt
        Makes the error for a damaged chunk from its offset.
    """

    def __init__(
        self,
        memory: memoryview,
        pieces: Pieces,
        by_chunk: Sequence[int],
        by_storage: Sequence[int],
        corrupt: Callable[[int], SnapshotError],
    ) -> None:
        self._memory = memory
        self._pieces = pieces
        self._by_chunk = by_chunk
        self._by_storage = by_storage
        self._corrupt = corrupt

    def __call__(self, offset: int, data: memoryview) -> bool:
        index = self._pieces.chunk_at.get(offset)
        if index is None:
            right = digest(data) == self._by_storage[self._pieces.small_at[offset]]
        else:
            # The padding, which belongs to the chunk, is not part of the data.
            whole = self._memory[offset : offset + align(len(data), PAGE_BYTES)]
            right = digest(whole) == self._by_chunk[index]
        if not right:
            raise self._corrupt(offset)
        return True
