"""What is packed, what is copied as it is, and in which portions: pure functions, no device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.kernels.cuda import copy_plan
from gpuslice.kernels.cuda.copy_plan import ALIGN_BYTES, Packed, Piece, Place, Span
from gpuslice.kernels.host.copies import CHUNK_BYTES

KIB = 1 << 10


def laid_out(sizes: list[int], first: int = 0) -> list[Place]:
    """One after the other, each at a multiple of the alignment, as a snapshot has its small storages."""
    places, position = [], first
    for nbytes in sizes:
        places.append(Place(position, nbytes))
        position += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return places


def test_only_small_storages_are_packed_and_not_a_single_one() -> None:
    places = [
        Place(0, 0),
        Place(0, 1),
        Place(256, copy_plan.PACK_BYTES - 1),
        Place(1 << 21, copy_plan.PACK_BYTES),
    ]
    assert copy_plan.small(places) == [1, 2]
    assert copy_plan.small(places[:2]) == []
    assert copy_plan.small(places, 0) == []


def test_neighbours_in_the_arena_share_one_copy() -> None:
    places = laid_out([4, 256, 1000, 1], first=4096)
    (packed,) = copy_plan.pack(places, range(4))
    assert packed.spans == (Span(4096, 0, 256 + 256 + 1024 + 1),)
    assert [staged for _, staged in packed.staged()] == [0, 256, 512, 1536]
    assert packed.nbytes == 1537


def test_they_are_packed_in_the_order_of_the_arena() -> None:
    places = [Place(512, 10), Place(0, 10), Place(256, 10)]
    (packed,) = copy_plan.pack(places, [0, 1, 2])
    assert [piece.storage for piece in packed.pieces] == [1, 2, 0]
    assert packed.spans == (Span(0, 0, 522),)


def test_what_may_be_somebody_elses_is_not_copied_along() -> None:
    """Between the two lies a storage that is none of ours."""
    places = [Place(256, 4), Place(768, 4)]
    (packed,) = copy_plan.pack(places, [0, 1])
    assert packed.spans == (Span(256, 0, 4), Span(768, 256, 4))


def test_storages_without_a_gap_are_neighbours_wherever_they_lie() -> None:
    (packed,) = copy_plan.pack([Place(7, 5), Place(12, 9)], [0, 1])
    assert packed.spans == (Span(7, 7, 14),)


def test_more_than_fits_the_staging_buffer_takes_more_launches() -> None:
    places = laid_out([1000] * 10)
    packed = copy_plan.pack(places, range(10), staging_bytes=4 * KIB)
    assert [len(step.pieces) for step in packed] == [4, 4, 2]
    assert all(step.spans[0].staged == 0 for step in packed)


def test_one_that_is_larger_than_the_buffer_is_packed_alone() -> None:
    packed = copy_plan.pack(laid_out([10, 5000, 10]), range(3), staging_bytes=KIB)
    assert [[piece.nbytes for piece in step.pieces] for step in packed] == [[10], [5000], [10]]


@given(
    sizes=st.lists(st.integers(1, 600), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 600), min_size=12, max_size=12),
    staging_bytes=st.sampled_from([1, 700, 2048, 1 << 20]),
)
def test_packing_moves_every_byte_once_and_no_other(
    sizes: list[int], gaps: list[int], staging_bytes: int
) -> None:
    places, position = [], 0
    for nbytes, gap in zip(sizes, gaps, strict=False):
        position += gap
        places.append(Place(position, nbytes))
        position += nbytes
    packed = copy_plan.pack(places, range(len(places)), staging_bytes)
    assert sorted(piece.storage for step in packed for piece in step.pieces) == list(range(len(places)))
    for step in packed:
        assert step.nbytes <= staging_bytes or len(step.spans) == 1
        check_spans(step, places)


def check_spans(step: Packed, places: list[Place]) -> None:
    owned = {at for offset, nbytes in places for at in range(offset, offset + nbytes)}
    taken: set[int] = set()
    for offset, staged, nbytes in step.spans:
        assert staged % ALIGN_BYTES == offset % ALIGN_BYTES, "as far off alignment as in the arena"
        assert taken.isdisjoint(range(staged, staged + nbytes))
        taken.update(range(staged, staged + nbytes))
        inside = {at for at in range(offset, offset + nbytes) if at in owned}
        ours = {at for piece in step.pieces for at in range(piece.offset, piece.offset + piece.nbytes)}
        assert inside <= ours, "nothing of a storage outside this step is written"
    for piece, staged in step.staged():
        (span,) = [s for s in step.spans if s.offset <= piece.offset < s.offset + s.nbytes]
        assert staged - span.staged == piece.offset - span.offset
        assert piece.offset + piece.nbytes <= span.offset + span.nbytes


def test_large_storages_are_cut_into_chunks() -> None:
    places = [Place(0, 100), Place(4096, 2 * CHUNK_BYTES + 5), Place(0, 0)]
    assert copy_plan.chunks(places, [1, 2]) == [
        Piece(1, 0, 4096, CHUNK_BYTES),
        Piece(1, CHUNK_BYTES, 4096 + CHUNK_BYTES, CHUNK_BYTES),
        Piece(1, 2 * CHUNK_BYTES, 4096 + 2 * CHUNK_BYTES, 5),
    ]


def test_blocks_are_portions_of_about_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_plan, "BLOCK_BYTES", 10)
    pieces = [Piece(number, 0, 0, nbytes) for number, nbytes in enumerate([6, 4, 1, 30, 2, 9])]
    assert [[p.nbytes for p in block] for block in copy_plan.blocks(pieces)] == [
        [6, 4],
        [1],
        [30],
        [2],
        [9],
    ]
    assert list(copy_plan.blocks([])) == []


def test_chunks_that_follow_each_other_are_one_copy() -> None:
    pieces = [Piece(1, 0, 10, 4), Piece(1, 4, 14, 4), Piece(1, 12, 22, 4), Piece(2, 16, 26, 4)]
    assert list(copy_plan.copies(pieces)) == [Piece(1, 0, 10, 8), Piece(1, 12, 22, 4), Piece(2, 16, 26, 4)]
