"""Host memory: pages, mappings, copies."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from gpuslice.kernels.host import (
    PAGE_BYTES,
    AddressSpace,
    address_space,
    drop_pages,
    enclosing,
    overlapping,
    prefer_huge_pages,
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


def test_asking_for_huge_pages_changes_no_byte() -> None:
    array = np.arange(3 << 20, dtype=np.uint8)
    address, half = view_address(memoryview(array)), array.nbytes // 2
    prefer_huge_pages([(address + half + 100, half - 100), (address, half), (8, 16)])
    assert np.array_equal(array, np.arange(3 << 20, dtype=np.uint8))


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
