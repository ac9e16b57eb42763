"""Host memory as the kernel sees it: resident bytes, mappings, dropping pages, huge pages."""

from __future__ import annotations

import bisect
import ctypes
import errno
import functools
import mmap
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
#: Of Linux 5.14: fault all pages in now.
_MADV_POPULATE_WRITE = 23
#: Of Linux 6.1: make one huge page of the small ones that are there. It needs no privilege, as a mount's
#: option ``huge=`` does, and for files only the setting ``deny`` forbids it.
_MADV_COLLAPSE = 25
#: For less memory, hundreds of vectors say, asking and putting together takes longer than its page faults.
_WORTH_ASKING_BYTES = 2 * HUGE_PAGE_BYTES
_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def resident_anonymous_bytes() -> int:
    """Return RssAnon of this process: memory that is neither a file's nor shared, so neither the RAM disk's.

    Return 0 if the kernel does not say: the number only informs.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in _STATUS.read_bytes().splitlines():  # the process's name in it may be no text
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def view_address(view: memoryview) -> int:
    """Address of the first byte of a contiguous view."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def advise(address: int, nbytes: int, advice: int) -> int:
    """``madvise(2)``: 0, or the number of the error."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


@functools.cache
def address_space() -> memoryview:
    """All memory as bytes: a slice is the range at that address, for as long as somebody keeps it mapped."""
    return memoryview((ctypes.c_uint8 * (1 << 56)).from_address(0)).cast("B")


class HugePages:
    """Memory that is about to be filled, behind huge pages as far as it fills at least a quarter of one.

    A page fault then costs the same for 2 MiB as otherwise for 4 KiB, and so does giving the memory back.
    Neighbours, as the C allocator makes them, share their huge pages; what else there is of such a page is
    mostly free memory between them. But a block in which the allocator has written its header may have a
    small page already and would get only such; it has to be put together. Only then: the kernel waits for
    every processor each time. A kernel without huge pages says no, and nothing changes.

    Parameters
    ----------
    ranges
        Address and bytes of each; all of it is overwritten soon.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._blocks: set[int] = set()
        if sum(nbytes for _, nbytes in ranges) < _WORTH_ASKING_BYTES or not _huge_pages_are_allowed():
            return
        filled: Counter[int] = Counter()
        for address, nbytes in ranges:
            for block in _blocks(address, nbytes):
                start = block * HUGE_PAGE_BYTES
                filled[block] += min(address + nbytes, start + HUGE_PAGE_BYTES) - max(address, start)
        self._blocks = {block for block, nbytes in filled.items() if 4 * nbytes >= HUGE_PAGE_BYTES}
        for first, count in _runs(sorted(self._blocks)):
            advise(first * HUGE_PAGE_BYTES, count * HUGE_PAGE_BYTES, _MADV_HUGEPAGE)

    def collapse(self, address: int, nbytes: int) -> None:
        """Before a range is written: put the blocks that it lies in together, by whichever thread."""
        for block in self._blocks.intersection(_blocks(address, nbytes)):
            self._blocks.discard(block)
            if 0 < _absent_pages(block * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES) < HUGE_PAGE_BYTES // PAGE_BYTES:
                advise(block * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _MADV_COLLAPSE)


def _blocks(address: int, nbytes: int) -> range:
    """The numbers of the huge pages that a range lies in."""
    return range(address // HUGE_PAGE_BYTES, (address + nbytes - 1) // HUGE_PAGE_BYTES + 1)


def _absent_pages(address: int, nbytes: int) -> int:
    """How many pages of whole ones of a mapping have no memory yet; 0 if it is not mapped."""
    present = (ctypes.c_ubyte * (nbytes // PAGE_BYTES))()
    return bytes(present).count(0) if _libc.mincore(address, nbytes, present) == 0 else 0


def trim() -> None:
    """Have glibc return freed pages to the kernel, also those below a heap's top; musl keeps them."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first of each run of consecutive numbers, and how many they are."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        numbers = [block for _, block in run]
        yield numbers[0], len(numbers)


@functools.cache
def _huge_pages_are_allowed() -> bool:
    """Whether the machine lets a process ask for them; putting them together would not ask again."""
    with suppress(OSError, ValueError):
        return "[never]" not in _HUGE_PAGES.read_text(encoding="ascii")
    return False


def populate(address: int, nbytes: int) -> None:
    """Fault in the pages of a mapping to be written, so that whoever uses them first need not.

    Other threads run meanwhile. A kernel that cannot do it leaves it to the first use.

    Raises
    ------
    OSError
        If there are not enough pages.
    """
    number = advise(address, nbytes, _MADV_POPULATE_WRITE)
    if number not in (0, errno.EINVAL):
        raise OSError(number, f"madvise({address:#x}, {nbytes}, MADV_POPULATE_WRITE) failed")


def overlapping(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """For each range ``(address, nbytes)`` where it begins, or the first of those that it overlaps with."""
    starts, start, reach = [0] * len(ranges), 0, -1
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        address, nbytes = ranges[index]
        if address >= reach:
            start = address
        starts[index] = start
        reach = max(reach, address + nbytes)
    return starts


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """The whole pages inside a range, as ``(address, nbytes)``; ``nbytes`` may be 0."""
    first = -(-address // PAGE_BYTES) * PAGE_BYTES
    last = (address + nbytes) // PAGE_BYTES * PAGE_BYTES
    return first, max(0, last - first)


def absent_bytes(address: int, nbytes: int) -> int:
    """How much memory the whole pages inside a range of a mapping have yet to get."""
    return _absent_pages(*whole_pages(address, nbytes)) * PAGE_BYTES


def drop_pages(address: int, nbytes: int) -> None:
    """Give the whole pages inside a range back to the kernel; they read as zeros afterwards.

    Raises
    ------
    OSError
        If the kernel refuses, for instance because the pages are locked.
    """
    first, length = whole_pages(address, nbytes)
    if length and (number := advise(first, length, _MADV_DONTNEED)):
        raise OSError(number, f"madvise({first:#x}, {length}, MADV_DONTNEED) failed")


class AddressSpace:
    """``/proc/self/maps`` at the first question: which ranges are private, anonymous and writable.

    None, if the file cannot be read: then no page of unknown origin is dropped.
    """

    @functools.cached_property
    def _private_anonymous(self) -> list[tuple[int, int]]:
        """Start and end of each such range, as large as can be."""
        found: list[tuple[int, int]] = []
        try:
            lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        for line in lines:
            span, permissions, _, _, inode, *name = line.split(maxsplit=5)
            anonymous = inode == "0" and (not name or name[0].startswith(("[heap]", "[anon:")))
            if permissions == "rw-p" and anonymous:
                start, end = (int(part, 16) for part in span.split("-"))
                if found and found[-1][1] == start:
                    start = found.pop()[0]
                found.append((start, end))
        return found

    def is_private_anonymous(self, address: int, nbytes: int) -> bool:
        """Whether all of a range is private, anonymous and writable: dropping its pages is ours alone."""
        index = bisect.bisect_right(self._private_anonymous, (address, sys.maxsize)) - 1
        return index >= 0 and address + nbytes <= self._private_anonymous[index][1]
