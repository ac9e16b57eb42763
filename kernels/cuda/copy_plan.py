"""The plan of a copy between a GPU and an arena, made before anything is queued.

Large storages are copied chunk by chunk, several chunks at a time. For small ones, starting a copy takes
longer than the copy, so they are packed: a kernel gathers them into a staging buffer in the order in which
they lie in the arena, and one copy moves them. The functions here are pure: they know sizes and places, no
streams and no addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpuslice.kernels.host.copies import CHUNK_BYTES

#: Smaller storages are packed: on an H100 (benchmarks/gpu_suite/threshold.py) those of 1 MiB then take 0.7 of
#: the time that they take one by one, those of 2 MiB as long.
PACK_BYTES = 2 << 20
#: Most bytes that one launch packs. More small storages take more launches.
STAGING_BYTES = 64 << 20
#: Bytes queued, waited for and inspected together: 0.3 ms of a PCIe 5 link, so neither starting it nor
#: inspecting the last one shows.
BLOCK_BYTES = 16 << 20
#: The same for bytes without inspection: fewer copies leave fewer gaps.
UNSEEN_BLOCK_BYTES = 64 << 20
#: Alignment of small storages in an arena and in torch's own blocks. Bytes between a storage's end and the
#: next multiple of this are padding.
ALIGN_BYTES = 256


class Place(NamedTuple):
    """Where one storage lies in the arena, and its size."""

    offset: int
    nbytes: int


class Piece(NamedTuple):
    """Bytes of one storage, from ``start`` in it to ``offset`` in the arena."""

    storage: int
    start: int
    offset: int
    nbytes: int


class Span(NamedTuple):
    """A contiguous part of the arena and of the staging buffer."""

    offset: int
    staged: int
    nbytes: int

    @property
    def end(self) -> int:
        """End of the span in the staging buffer."""
        return self.staged + self.nbytes

    def joined(self, piece: Piece) -> Span | None:
        """Return this span extended by the piece that follows; None if other bytes may lie between them."""
        end = self.offset + self.nbytes
        if piece.offset not in (end, _align(end)):
            return None
        return self._replace(nbytes=piece.offset + piece.nbytes - self.offset)


@dataclass(frozen=True, slots=True)
class Packed:
    """Small storages that one kernel launch gathers into a staging buffer, or scatters from it.

    Attributes
    ----------
    pieces
        Whole storages, in the arena's order.
    spans
        The copies between staging buffer and arena, in the same order.
    """

    pieces: tuple[Piece, ...]
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the staging buffer."""
        return self.spans[-1].end

    def staged(self) -> Iterator[tuple[Piece, int]]:
        """Yield each piece with its offset in the staging buffer."""
        spans = iter(self.spans)
        span = next(spans)
        for piece in self.pieces:
            while piece.offset >= span.offset + span.nbytes:
                span = next(spans)
            yield piece, span.staged + piece.offset - span.offset


def small(places: Sequence[Place], pack_bytes: int = PACK_BYTES) -> list[int]:
    """Return the numbers of the storages to pack; an empty list if there is only one."""
    found = [number for number, place in enumerate(places) if 0 < place.nbytes < pack_bytes]
    return found if len(found) > 1 else []


def pack(places: Sequence[Place], numbers: Iterable[int], staging_bytes: int | None = None) -> list[Packed]:
    """Divide small storages into launches, each with a staging buffer of at most ``staging_bytes``.

    Neighbours in the arena are neighbours in the buffer, and share a copy. Padding bytes between them are
    copied along; between others nothing is written.
    """
    staging_bytes = staging_bytes or STAGING_BYTES
    found: list[Packed] = []
    pieces: list[Piece] = []
    spans: list[Span] = []
    for piece in sorted((Piece(number, 0, *places[number]) for number in numbers), key=_by_offset):
        joined = spans[-1].joined(piece) if spans else None
        span = joined or _first_span(piece, spans[-1].end if spans else 0)
        if spans and span.end > staging_bytes:
            found.append(Packed(tuple(pieces), tuple(spans)))
            pieces, spans, joined, span = [], [], None, _first_span(piece, 0)
        if joined:
            spans.pop()
        spans.append(span)
        pieces.append(piece)
    if pieces:
        found.append(Packed(tuple(pieces), tuple(spans)))
    return found


def _by_offset(piece: Piece) -> int:
    return piece.offset


def _first_span(piece: Piece, taken_bytes: int) -> Span:
    """Return a span that begins with a piece, aligned in the buffer as the piece is in the arena."""
    return Span(piece.offset, _align(taken_bytes) + piece.offset % ALIGN_BYTES, piece.nbytes)


def chunks(places: Sequence[Place], numbers: Iterable[int]) -> list[Piece]:
    """Return these storages cut into chunks, as an inspector sees them."""
    return [
        Piece(number, start, places[number].offset + start, min(CHUNK_BYTES, places[number].nbytes - start))
        for number in numbers
        for start in range(0, places[number].nbytes, CHUNK_BYTES)
    ]


def blocks(pieces: Iterable[Piece], block_bytes: int | None = None) -> Iterator[list[Piece]]:
    """Yield groups of pieces of at most ``block_bytes``, in order. A larger piece is a group of its own."""
    block_bytes = block_bytes or BLOCK_BYTES
    block: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        if block and nbytes + piece.nbytes > block_bytes:
            yield block
            block, nbytes = [], 0
        block.append(piece)
        nbytes += piece.nbytes
    if block:
        yield block


def copies(block: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the fewest copies that move a block's pieces: adjacent chunks of a storage become one copy."""
    before: Piece | None = None
    for piece in block:
        if before is None:
            before = piece
        elif before.storage == piece.storage and before.start + before.nbytes == piece.start:
            before = before._replace(nbytes=before.nbytes + piece.nbytes)
        else:
            yield before
            before = piece
    if before is not None:
        yield before


def _align(position: int) -> int:
    return -(-position // ALIGN_BYTES) * ALIGN_BYTES
