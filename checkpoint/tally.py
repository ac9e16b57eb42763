"""Checksums taken while a copy is under way, chunk by chunk, by whichever thread copies the chunk.

A `Tally` watches a copy into an arena: it notes the checksums that the snapshot will carry, and lets chunks
be that have not changed since the arena's last snapshot. A `Proof` watches the copy back.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from xxhash import xxh3_128, xxh3_128_intdigest

from gpuslice.errors import CorruptSnapshotError, SnapshotError

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
    touched
        By the number of a small storage, the chunks that it lies in: one or two, as positions in the table.
    shared
        How many small storages lie in each of those chunks.
    """

    chunk_at: dict[int, int]
    small_at: dict[int, int]
    touched: dict[int, tuple[int, ...]]
    shared: dict[int, int]

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, sizes: tuple[int, ...], placement: Placement) -> Pieces:
        """The pieces of a layout; jobs suspend the same one again and again."""
        chunk_at: dict[int, int] = {}
        small_at: dict[int, int] = {}
        touched: dict[int, tuple[int, ...]] = {}
        slab = placement.extents[-1].offset if placement.extents else 0
        before = sum(map(chunk_count, (nbytes for nbytes in sizes if nbytes >= LARGE_BYTES)))
        for sid, (nbytes, offset) in enumerate(zip(sizes, placement.offsets, strict=True)):
            if nbytes >= LARGE_BYTES:
                first = placement.first_chunk[sid]
                for number in range(chunk_count(nbytes)):
                    chunk_at[offset + number * CHUNK_BYTES] = first + number
            elif nbytes:
                small_at[offset] = sid
                ends = (offset - slab) // CHUNK_BYTES, (offset + nbytes - 1 - slab) // CHUNK_BYTES
                touched[sid] = tuple(before + number for number in sorted(set(ends)))
        shared = Counter(number for numbers in touched.values() for number in numbers)
        return cls(chunk_at, small_at, touched, dict(shared))


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

    Small storages share chunks. Such a chunk is hashed in the arena by whoever copied the last of them, while
    it is still in the cache.
    """

    def __init__(
        self, memory: memoryview, sizes: tuple[int, ...], placement: Placement, residue: Residue | None
    ) -> None:
        self._memory = memory
        self._sizes = sizes
        self._placement = placement
        self._pieces = Pieces.of(sizes, placement)
        self._ranges = list(chunks(placement.extents))
        total = len(self._ranges)
        if residue is None or residue.placement != placement:
            residue = Residue(placement, (None,) * total, (None,) * total)
        self._before = residue
        self._chunks: list[int | None] = [None] * total
        self._marks: list[int | None] = [None] * total
        self._small: dict[int, int] = {}
        self._slab: dict[int, int] = {}
        self._missing = dict(self._pieces.shared)
        self._lock = threading.Lock()
        #: The small storage that each thread is copying.
        self._under_way: dict[int, int] = {}

    def __call__(self, offset: int, data: memoryview) -> bool:
        index = self._pieces.chunk_at.get(offset)
        if index is None:
            sid = self._pieces.small_at[offset]
            self._arrived(sid)
            self._small[sid] = digest(data)
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

    def _arrived(self, next_sid: int) -> None:
        """Whoever looks at a small storage has copied the one that it looked at before."""
        thread = threading.get_ident()
        with self._lock:
            arrived = self._under_way.get(thread)
            self._under_way[thread] = next_sid
            numbers = () if arrived is None else self._pieces.touched[arrived]
            for number in numbers:
                self._missing[number] -= 1
            whole = [number for number in numbers if not self._missing[number]]
        for number in whole:
            start, stop = self._ranges[number]
            self._slab[number] = digest(self._memory[start:stop])

    def residue(self) -> Residue:
        """What the arena holds now, for its next snapshot."""
        return Residue(self._placement, tuple(self._chunks), tuple(self._marks))

    def digests(self) -> tuple[list[int], list[int]]:
        """Chunk digests and storage digests; what was not seen on its way is read from the arena."""
        unseen = [i for i, value in enumerate(self._chunks) if value is None and i not in self._slab]
        read = self._slab | dict(
            zip(unseen, chunk_digests(self._memory, [self._ranges[i] for i in unseen]), strict=True)
        )
        by_chunk = [
            read[index] if value is None else value & _LOWER_HALF for index, value in enumerate(self._chunks)
        ]
        seen = map(self._small.get, range(len(self._sizes)))
        by_storage = [
            self._storage(sid, by_chunk) if value is None else value for sid, value in enumerate(seen)
        ]
        return by_chunk, by_storage

    def proof(self) -> Proof:
        """An inspector for taking back, before anything was published, what has been copied out."""

        def damaged(offset: int) -> SnapshotError:
            return CorruptSnapshotError(f"the copy at {offset} of an arena is not what was copied there")

        return Proof(self._memory, self._pieces, *self.digests(), corrupt=damaged)

    def _storage(self, sid: int, by_chunk: Sequence[int]) -> int:
        nbytes, first = self._sizes[sid], self._placement.first_chunk[sid]
        mine = by_chunk[first : first + chunk_count(nbytes)]
        return storage_digest(self._memory, nbytes, self._placement.offsets[sid], mine)


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
