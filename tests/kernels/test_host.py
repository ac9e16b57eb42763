"""Host memory: pages, mappings, copies."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections import Counter

import numpy as np
import pytest

from gpuslice.kernels import host
from gpuslice.kernels.host import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    AddressSpace,
    HugePages,
    address_space,
    drop_pages,
    enclosing,
    filled_blocks,
    overlapping,
    present_pages,
    runs,
    view_address,
    whole_pages,
)


@pytest.mark.parametrize(
    ("address", "nbytes", "expected"),
    [
        (PAGE_BYTES, PAGE_BYTES, (PAGE_BYTES, PAGE_BYTES)),
        (PAGE_BYTES + 1, 2 * PAGE_BYTES, (2 * PAGE_BYTES, PAGE_BYTES)),
        (PAGE_BYTES + 1, PAGE_BYTES, (2 * PAGE_BYTES, 0)),
        (PAGE_BYTES, 10, (PAGE_BYTES, 0)),
    ],
)
def test_whole_pages(address: int, nbytes: int, expected: tuple[int, int]) -> None:
    assert whole_pages(address, nbytes) == expected


def test_dropped_pages_read_as_zeros_and_the_edges_stay() -> None:
    array = np.ones(10 * PAGE_BYTES, np.uint8)
    address = view_address(memoryview(array))
    first, nbytes = whole_pages(address, array.nbytes)
    drop_pages(address, array.nbytes)
    inside = array[first - address : first - address + nbytes]
    assert not inside.any()
    assert array.sum() == array.nbytes - nbytes


def test_pages_that_the_kernel_keeps_are_an_error() -> None:
    with pytest.raises(OSError, match="madvise"):
        drop_pages(0, 16 * PAGE_BYTES)


def test_memory_by_address() -> None:
    array = np.arange(100, dtype=np.uint8)
    address = view_address(memoryview(array))
    assert bytes(address_space()[address + 10 : address + 20]) == bytes(range(10, 20))


def test_huge_pages_change_no_byte() -> None:
    array = np.arange(3 * HUGE_PAGE_BYTES, dtype=np.uint8)
    address, half = view_address(memoryview(array)), array.nbytes // 2
    pages = HugePages([(address + half + 100, half - 100), (address, half), (8, 16)])
    pages.ready(address, array.nbytes)
    assert np.array_equal(array, np.arange(3 * HUGE_PAGE_BYTES, dtype=np.uint8))


class Kernel:
    """Writes down what it is asked for; has some pages of some blocks."""

    def __init__(self, pages: dict[int, int]) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.pages = pages

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        self.asked.append((advice, address // HUGE_PAGE_BYTES, nbytes // HUGE_PAGE_BYTES))
        return 0

    def mincore(self, address: int, nbytes: int, pages: ctypes.Array[ctypes.c_uint8]) -> int:
        present = self.pages.get(address // HUGE_PAGE_BYTES, 0)
        pages[:present] = [1] * present
        return 0 if present >= 0 else -1


def test_torn_blocks_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    block = HUGE_PAGE_BYTES
    kernel = Kernel({10: 2, 11: 512, 12: 1, 16: 1, 18: 511})
    monkeypatch.setattr(host, "_libc", kernel)
    monkeypatch.setattr(host, "_huge_pages_are_allowed", lambda: True)
    # From the middle of block 10 to that of 14, a header in between in 12; too little of 16; 18 with a gap.
    pages = HugePages(
        [
            (12 * block + 64, 5 * block // 2 - 64),
            (10 * block + block // 2, 3 * block // 2 - 64),
            (16 * block + 4096, block // 4 - 1),
            (18 * block, block // 8),
            (18 * block + block // 2, block // 8),
        ]
    )
    assert kernel.asked == [(host._MADV_HUGEPAGE, 10, 5), (host._MADV_HUGEPAGE, 18, 1)]
    for start, count in ((9, 2), (10, 2), (11, 2), (12, 3), (16, 1), (18, 1)):
        pages.ready(start * block, count * block)
    assert kernel.asked[2:] == [(host._MADV_COLLAPSE, torn, 1) for torn in (10, 12, 18)]


def test_which_ranges_page_faults_will_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    block = HUGE_PAGE_BYTES
    monkeypatch.setattr(host, "_libc", Kernel({10: 512, 12: 3}))
    monkeypatch.setattr(host, "_huge_pages_are_allowed", lambda: True)
    pages = HugePages([(10 * block, 3 * block)])
    rows = np.array([[10 * block, block], [12 * block, block], [11 * block - 1, 1]], np.uint64)
    assert not pages.all_ready(rows)
    assert pages.all_ready(np.array([[10 * block, block + 1]], np.uint64))
    assert pages.all_ready(np.array([[10 * block, 1], [11 * block, 1]], np.uint64))


def test_how_many_pages_of_a_block_are_there() -> None:
    with mmap.mmap(-1, 3 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        view = memoryview(memory)
        block = -(-view_address(view) // HUGE_PAGE_BYTES)
        start = block * HUGE_PAGE_BYTES - view_address(view)
        assert present_pages(block) == 0
        for at in (0, 5, 511):
            memory[start + at * PAGE_BYTES] = 1
        assert present_pages(block) == 3
        host.populate(block * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
        assert present_pages(block) == 512
        view.release()
    assert present_pages(0) == 0, "nothing is mapped there"


def test_blocks_are_chosen_by_how_much_of_them_is_filled() -> None:
    generator = random.Random(3)
    address, ranges, filled = 7 * HUGE_PAGE_BYTES, [], Counter[int]()
    for _ in range(200):
        address += generator.choice([0, 64, 5000, 700_000])
        nbytes = generator.choice([1, 300, 70_000, 5_000_000])
        ranges.append((address, nbytes))
        address += nbytes
    for start, nbytes in ranges:
        for block in range(start // HUGE_PAGE_BYTES, (start + nbytes) // HUGE_PAGE_BYTES + 1):
            first = block * HUGE_PAGE_BYTES
            filled[block] += max(0, min(start + nbytes, first + HUGE_PAGE_BYTES) - max(start, first))
    expected = sorted(block for block, nbytes in filled.items() if 4 * nbytes >= HUGE_PAGE_BYTES)
    generator.shuffle(ranges)
    assert filled_blocks(ranges).tolist() == expected
    assert len(expected) < len(filled)
    assert filled_blocks([]).tolist() == []
    assert [run.tolist() for run in runs(np.array([1, 2, 5, 7, 8]))] == [[1, 2], [5], [7, 8]]
    assert runs(np.array([], np.int64)) == []


def test_where_the_machine_forbids_huge_pages_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel({5: 3})
    monkeypatch.setattr(host, "_libc", kernel)
    monkeypatch.setattr(host, "_huge_pages_are_allowed", lambda: False)
    HugePages([(0, 10 * HUGE_PAGE_BYTES)]).ready(0, 10 * HUGE_PAGE_BYTES)
    assert not kernel.asked


def test_which_memory_is_plain() -> None:
    array = np.ones(1 << 20, np.uint8)
    with mmap.mmap(-1, 1 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared:
        space = AddressSpace()
        view = memoryview(shared)
        assert space.is_plain(view_address(memoryview(array)), array.nbytes)
        assert not space.is_plain(view_address(view), 1 << 20)
        assert not space.is_plain(view_address(memoryview(array)), 1 << 45)
        view.release()


def test_ranges_that_overlap_are_found() -> None:
    assert overlapping([]) == []
    assert overlapping([(30, 10), (10, 10), (20, 10)]) == [30, 10, 20]  # they only touch
    assert overlapping([(10, 30), (15, 5), (39, 11), (49, 1), (50, 1)]) == [10, 10, 10, 10, 50]
    assert overlapping([(20, 5), (10, 0), (10, 11)]) == [10, 10, 10]


def test_the_range_around_an_address_is_found() -> None:
    ranges = [(100, 50), (10, 20)]
    assert enclosing([10, 29, 30, 99, 100, 149, 150, 5], ranges) == [10, 10, 30, 99, 100, 100, 150, 5]
    assert enclosing([7], []) == [7]
