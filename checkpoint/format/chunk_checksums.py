"""Checksums taken while a copy is under way, chunk by chunk, by whichever thread copies the chunk.

A `ChecksumRecorder` watches a copy into an arena: it notes the checksums that the snapshot will
carry, and lets chunks be that have not changed since the arena's last snapshot. A `ChecksumVerifier` watches
the copy back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_128, xxh3_128_intdigest

from gpuslice.errors import CorruptSnapshotError, SnapshotError
from gpuslice.kernels.host.checksummed_copies import ROW, Expected, Sums

from .checksum import Digests, chunk_digests, digest
from .layout import PAGE_BYTES, Placement

_ZEROS = bytes(2 * PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class ArenaChecksums:
    """What an arena still holds of its last snapshot, by chunk.

    Attributes
    ----------
    chunks
        XXH3-128, as ``kernels.sums`` has them.
    marks
        Those that a GPU made (``kernels.copying.Marks``); never compared with anything else. ``None``
        where there is none.
    """

    placement: Placement
    chunks: np.ndarray[Any, Any]
    marks: tuple[int | None, ...]


class ChecksumRecorder:
    """Inspector of a copy into ``memory``.

    On the host every byte is hashed where it comes from, so a copy that went wrong shows when it is taken
    back. A chunk is let be only if 128 bits of hash say that the arena has it already: version counters of
    tensors do not see what NumPy, ``.data`` or a C extension write.
    """

    def __init__(self, memory: memoryview, placement: Placement, previous: ArenaChecksums | None) -> None:
        self._memory = memory
        self._placement = placement
        total = placement.chunk_total
        if previous is None or previous.placement != placement:
            previous = ArenaChecksums(placement, np.zeros(total, ROW), (None,) * total)
        self._marks_before = previous.marks
        self._marks: list[int | None] = [None] * total
        self.sums = Sums(placement.chunk_table, previous.chunks, np.zeros(total, ROW))

    def __call__(self, offset: int, data: memoryview) -> bool:
        index = self._placement.chunk_at[offset]
        end, stop = offset + len(data), self._placement.chunks[index][1]
        if stop > end:
            state = xxh3_128(data)
            state.update(_ZEROS[: stop - end])
            value = state.intdigest()
            self._memory[end:stop] = _ZEROS[: stop - end]
        else:
            value = xxh3_128_intdigest(data)
        return self.sums.note(index, value)

    def marked(self, offset: int, mark: int) -> bool:
        """A GPU's mark of a chunk: if the last snapshot's had the same, so has it the same checksum."""
        index = self._placement.chunk_at[offset]
        self._marks[index] = mark
        if self._marks_before[index] != mark or not self.sums.before[index]["known"]:
            return False
        self.sums.now[index] = self.sums.before[index]
        return True

    def arena_checksums(self) -> ArenaChecksums:
        """What the arena holds now, for its next snapshot."""
        return ArenaChecksums(self._placement, self.sums.now, tuple(self._marks))

    def digests(self) -> Digests:
        """XXH3-64 of every chunk; those that were not seen on their way are read from the arena.

        It is the lower half of XXH3-128, for everything longer than 240 bytes; no chunk is shorter than 256.
        """
        now = self.sums.now
        found: Digests = now["low"].copy()
        unseen = np.flatnonzero(now["known"] == 0)
        if len(unseen):
            ranges = [self._placement.chunks[index] for index in unseen]
            found[unseen] = np.array(chunk_digests(self._memory, ranges), np.uint64)
        return found

    def verifier(self) -> ChecksumVerifier:
        """An inspector for taking back, before anything was published, what has been copied out."""

        def damaged(offset: int) -> SnapshotError:
            return CorruptSnapshotError(f"the copy at {offset} of an arena is not what was copied there")

        return ChecksumVerifier(self._memory, self._placement, self.digests(), corrupt=damaged)


class ChecksumVerifier:
    """Inspector of a copy out of ``memory``: every chunk must have the checksum that it was written with.

    Parameters
    ----------
    corrupt
        Makes the error for a damaged chunk from its offset.
    """

    def __init__(
        self,
        memory: memoryview,
        placement: Placement,
        digests: Digests,
        corrupt: Callable[[int], SnapshotError],
    ) -> None:
        self._memory = memory
        self._placement = placement
        self.expected = Expected(placement.chunk_table, digests, corrupt)

    def __call__(self, offset: int, data: memoryview) -> bool:
        index = self._placement.chunk_at[offset]
        # The padding, which belongs to the chunk, is not part of the data.
        stop = self._placement.chunks[index][1]
        if digest(self._memory[offset:stop]) != int(self.expected.lows[index]):
            raise self.expected.damaged(offset)
        return True
