"""Host memory: pages, mappings, copies."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from gpuslice.kernels.host import process_memory
from gpuslice.kernels.host.process_memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    AddressSpace,
    HugePages,
    address_space,
    drop_pages,
    overlapping,
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
    pages.collapse(address, array.nbytes)
    assert np.array_equal(array, np.arange(3 * HUGE_PAGE_BYTES, dtype=np.uint8))


class Kernel:
    """Writes down what it is asked for; of some blocks it has one page, of some all, of the others none."""

    def __init__(self, torn: Collection[int] = (), present: Collection[int] = ()) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.torn, self.present = torn, present

    def mincore(self, address: int, nbytes: int, pages: ctypes.Array[ctypes.c_ubyte]) -> int:
        block, count = address // HUGE_PAGE_BYTES, nbytes // PAGE_BYTES
        pages[:] = [1] * count if block in self.present else [int(block in self.torn), *[0] * (count - 1)]
        return 0

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        self.asked.append((advice, address // HUGE_PAGE_BYTES, nbytes // HUGE_PAGE_BYTES))
        return 0


def test_blocks_of_which_some_pages_are_there_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, block = Kernel(torn=(10, 11, 14, 16, 18), present=(12,)), HUGE_PAGE_BYTES
    monkeypatch.setattr(process_memory, "_libc", kernel)
    monkeypatch.setattr(process_memory, "_huge_pages_are_allowed", lambda: True)
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
    assert kernel.asked == [(process_memory._MADV_HUGEPAGE, 10, 5), (process_memory._MADV_HUGEPAGE, 18, 1)]
    for start, count in ((9, 2), (10, 2), (11, 2), (12, 3), (16, 1), (18, 1)):
        pages.collapse(start * block, count * block)
    assert kernel.asked[2:] == [(process_memory._MADV_COLLAPSE, torn, 1) for torn in (10, 11, 14, 18)]


def test_for_little_memory_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, most = Kernel(), process_memory._WORTH_ASKING_BYTES
    monkeypatch.setattr(process_memory, "_libc", kernel)
    monkeypatch.setattr(process_memory, "_huge_pages_are_allowed", lambda: True)
    HugePages([(most, most // 2), (3 * most, most // 2 - 1)]).collapse(most, most)
    assert not kernel.asked
    HugePages([(most, most // 2), (3 * most, most // 2)])
    assert kernel.asked


def test_where_the_machine_forbids_huge_pages_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(process_memory, "_libc", kernel)
    monkeypatch.setattr(process_memory, "_huge_pages_are_allowed", lambda: False)
    HugePages([(0, 10 * HUGE_PAGE_BYTES)]).collapse(0, 10 * HUGE_PAGE_BYTES)
    assert not kernel.asked


def test_which_memory_is_plain() -> None:
    array = np.ones(1 << 20, np.uint8)
    with mmap.mmap(-1, 1 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared:
        space = AddressSpace()
        view = memoryview(shared)
        assert space.is_private_anonymous(view_address(memoryview(array)), array.nbytes)
        assert not space.is_private_anonymous(view_address(view), 1 << 20)
        assert not space.is_private_anonymous(view_address(memoryview(array)), 1 << 45)
        view.release()


def test_ranges_that_overlap_are_found() -> None:
    assert overlapping([]) == []
    assert overlapping([(30, 10), (10, 10), (20, 10)]) == [30, 10, 20]  # they only touch
    assert overlapping([(10, 30), (15, 5), (39, 11), (49, 1), (50, 1)]) == [10, 10, 10, 10, 50]
    assert overlapping([(20, 5), (10, 0), (10, 11)]) == [10, 10, 10]


def test_a_name_that_is_no_text_does_not_hide_what_is_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_bytes(b"Name:\ttrain\xc3\nRssAnon:\t  12 kB\n")
    monkeypatch.setattr(process_memory, "_STATUS", status)
    assert process_memory.resident_anonymous_bytes() == 12 << 10


@pytest.mark.parametrize("text", [None, b"RssAnon:\n", b"RssAnon: many\n"])
def test_a_kernel_that_does_not_say_what_is_resident_fails_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes | None
) -> None:
    if text is not None:
        (tmp_path / "status").write_bytes(text)
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(process_memory, "_MAPS", tmp_path / "maps")
    assert process_memory.resident_anonymous_bytes() == 0
    assert not AddressSpace().is_private_anonymous(0, PAGE_BYTES)
