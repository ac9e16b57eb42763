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
#: Since Linux 5.14: fault all pages in now.
_MADV_POPULATE_WRITE = 23
#: Since Linux 6.1: make one huge page of the small ones that are there. It needs no privilege, as a mount's
#: option ``huge=`` does, and for files only the setting ``deny`` forbids it.
_MADV_COLLAPSE = 25
#: For less memory than this, asking and collapsing takes longer than the page faults.
_WORTH_ASKING_BYTES = 2 * HUGE_PAGE_BYTES
_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def resident_anonymous_bytes() -> int:
    """Return RssAnon of this process: resident memory that belongs to no file and is not shared.

    The RAM disk is therefore not in it. Return 0 if the kernel does not say: the number only informs.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in _STATUS.read_bytes().splitlines():  # the process's name in it may be no text
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def view_address(view: memoryview) -> int:
    """Return the address of the first byte of a contiguous view."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def advise(address: int, nbytes: int, advice: int) -> int:
    """Call ``madvise(2)``, and return 0 or the error number."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


@functools.cache
def address_space() -> memoryview:
    """Return all memory as bytes. A slice is the range at that address, valid as long as it is mapped."""
    return memoryview((ctypes.c_uint8 * (1 << 56)).from_address(0)).cast("B")


class HugePages:
    """Memory that is about to be filled, put on huge pages where it fills at least a quarter of one.

    One page fault then covers 2 MiB instead of 4 KiB, and giving the memory back is as cheap. Neighbouring
    blocks of the C allocator share huge pages; the rest of such a page is mostly free memory. A block in
    which the allocator has written its header may already have a small page, and would get only small ones.
    Its pages are collapsed into a huge one. Only then, because the kernel waits for every processor each
    time. A kernel without huge pages refuses, and nothing changes.

    ``ranges`` are address and bytes of memory that will be overwritten completely.
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
        """Collapse small pages of a range into huge ones. Call before writing it, from any thread."""
        for block in self._blocks.intersection(_blocks(address, nbytes)):
            self._blocks.discard(block)
            if 0 < _absent_pages(block * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES) < HUGE_PAGE_BYTES // PAGE_BYTES:
                advise(block * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _MADV_COLLAPSE)


def _blocks(address: int, nbytes: int) -> range:
    """Return the numbers of the huge pages that a range touches."""
    return range(address // HUGE_PAGE_BYTES, (address + nbytes - 1) // HUGE_PAGE_BYTES + 1)


def _absent_pages(address: int, nbytes: int) -> int:
    """Return how many pages of a page-aligned range have no memory yet; 0 if it is not mapped."""
    present = (ctypes.c_ubyte * (nbytes // PAGE_BYTES))()
    return bytes(present).count(0) if _libc.mincore(address, nbytes, present) == 0 else 0


def trim() -> None:
    """Make glibc return freed pages to the kernel, also those below a heap's top. musl keeps them."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield first number and length of each run of consecutive numbers."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        numbers = [block for _, block in run]
        yield numbers[0], len(numbers)


@functools.cache
def _huge_pages_are_allowed() -> bool:
    """Return True if the machine lets a process ask for huge pages. Collapsing would not check that."""
    with suppress(OSError, ValueError):
        return "[never]" not in _HUGE_PAGES.read_text(encoding="ascii")
    return False


def populate(address: int, nbytes: int) -> None:
    """Fault in the pages of a mapping that will be written, so that the first use need not.

    Other threads run meanwhile. A kernel that lacks this leaves it to the first use.

    Raises
    ------
    OSError
        If there are not enough pages.
    """
    number = advise(address, nbytes, _MADV_POPULATE_WRITE)
    if number not in (0, errno.EINVAL):
        raise OSError(number, f"madvise({address:#x}, {nbytes}, MADV_POPULATE_WRITE) failed")


def overlapping(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each range ``(address, nbytes)`` the start of its group of overlapping ranges."""
    starts, start, reach = [0] * len(ranges), 0, -1
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        address, nbytes = ranges[index]
        if address >= reach:
            start = address
        starts[index] = start
        reach = max(reach, address + nbytes)
    return starts


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Return the whole pages inside a range as ``(address, nbytes)``; ``nbytes`` may be 0."""
    first = -(-address // PAGE_BYTES) * PAGE_BYTES
    last = (address + nbytes) // PAGE_BYTES * PAGE_BYTES
    return first, max(0, last - first)


def absent_bytes(address: int, nbytes: int) -> int:
    """Return how much memory the whole pages inside a range of a mapping still lack."""
    return _absent_pages(*whole_pages(address, nbytes)) * PAGE_BYTES


def drop_pages(address: int, nbytes: int) -> None:
    """Give the whole pages inside a range back to the kernel. They read as zeros afterwards.

    Raises
    ------
    OSError
        If the kernel refuses, for instance because the pages are locked.
    """
    first, length = whole_pages(address, nbytes)
    if length and (number := advise(first, length, _MADV_DONTNEED)):
        raise OSError(number, f"madvise({first:#x}, {length}, MADV_DONTNEED) failed")


class AddressSpace:
    """The private, anonymous and writable ranges of this process, from ``/proc/self/maps``.

    The file is read at the first question. If it cannot be read, there are no such ranges, so no page of
    unknown origin is dropped.
    """

    @functools.cached_property
    def _private_anonymous(self) -> list[tuple[int, int]]:
        """Start and end of each such range, adjacent ones joined."""
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
        """Return True if all of a range is private, anonymous and writable, so used by this process only."""
        index = bisect.bisect_right(self._private_anonymous, (address, sys.maxsize)) - 1
        return index >= 0 and address + nbytes <= self._private_anonymous[index][1]
