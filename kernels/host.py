"""Host memory as the kernel sees it: resident bytes, mappings, dropping pages, huge pages."""

from __future__ import annotations

import bisect
import ctypes
import errno
import functools
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
_BLOCK_PAGES = HUGE_PAGE_BYTES // PAGE_BYTES
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
#: Of Linux 5.14: fault all pages in now, to be read or to be written.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
#: Of Linux 6.1: make one huge page of the small ones that are there.
_MADV_COLLAPSE = 25
_PR_SET_THP_DISABLE = 41
_PR_GET_THP_DISABLE = 42
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

#: Addresses in units of `HUGE_PAGE_BYTES`.
_Blocks = np.ndarray[Any, Any]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def resident_anonymous_bytes() -> int:
    """RssAnon of this process: memory that is neither a file's nor shared, so neither the RAM disk's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def view_address(view: memoryview) -> int:
    """Address of the first byte of a contiguous view."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


@functools.cache
def address_space() -> memoryview:
    """All memory as bytes: a slice is the range at that address, for as long as somebody keeps it mapped."""
    return memoryview((ctypes.c_uint8 * (1 << 56)).from_address(0)).cast("B")


class HugePages:
    """Memory that is about to be filled, behind huge pages as far as it fills at least a quarter of one.

    A page fault then costs the same for 2 MiB as otherwise for 4 KiB, and so does giving the memory back.
    Neighbours, as the C allocator makes them, share their huge pages; what else there is of such a page is
    mostly free memory between them. But a block of which some page is there already, with the allocator's
    header, say, has small pages and would get only such; it has to be put together. A kernel without huge
    pages says no, and nothing changes.

    Parameters
    ----------
    ranges
        Address and bytes of each; all of it is overwritten soon.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._torn: set[int] = set()
        self._absent: set[int] = set()
        if not _huge_pages_are_allowed():
            return
        blocks = filled_blocks(ranges)
        put_behind_huge_pages(blocks)
        for block in blocks.tolist():
            pages = present_pages(block)
            if pages < _BLOCK_PAGES:
                (self._torn if pages else self._absent).add(block)

    def ready(self, address: int, nbytes: int) -> None:
        """Before a range is written: put the blocks that it lies in together, by whichever thread."""
        for block in range(address // HUGE_PAGE_BYTES, (address + nbytes - 1) // HUGE_PAGE_BYTES + 1):
            if block in self._torn:
                self._torn.discard(block)
                _libc.madvise(block * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _MADV_COLLAPSE)

    def all_ready(self, ranges: np.ndarray[Any, Any]) -> bool:
        """The same for rows of address and bytes; whether page faults will put some of it into the caches."""
        if self._torn:
            for address, nbytes in ranges.tolist():
                self.ready(address, nbytes)
        if not self._absent:
            return False
        ends = np.stack([ranges[:, 0], ranges[:, 0] + ranges[:, 1] - 1]) // HUGE_PAGE_BYTES
        return not self._absent.isdisjoint(ends.ravel().tolist())


@contextmanager
def small_pages() -> Iterator[None]:
    """Meanwhile no page fault of this process clears a whole huge page; for writes here and there."""
    set_before = _libc.prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0)
    if set_before != 0 or _libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        yield
        return
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def filled_blocks(ranges: Sequence[tuple[int, int]]) -> _Blocks:
    """The blocks of which ranges, address and bytes, fill at least a quarter; they do not overlap."""
    spans = np.array(sorted(ranges), np.int64).reshape(-1, 2)
    starts, sizes = spans.T
    first = starts // HUGE_PAGE_BYTES
    counts = (starts + sizes - 1) // HUGE_PAGE_BYTES - first + 1
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = np.unique(np.repeat(first, counts) + within)
    if not len(blocks):
        return blocks
    # How many bytes of the ranges lie below an address rises within each and stays between them.
    edges = np.stack([starts, starts + sizes], axis=1).ravel()
    below = np.repeat(np.cumsum(np.r_[0, sizes]), 2)[1:-1]
    filled = np.diff(
        np.interp([blocks * HUGE_PAGE_BYTES, (blocks + 1) * HUGE_PAGE_BYTES], edges, below), axis=0
    )
    enough: _Blocks = blocks[4 * filled[0] >= HUGE_PAGE_BYTES]
    return enough


def runs(blocks: _Blocks) -> list[_Blocks]:
    """Ascending numbers in runs of consecutive ones."""
    return np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1) if len(blocks) else []


def put_behind_huge_pages(blocks: _Blocks) -> None:
    """Let page faults bring whole huge pages there, if the machine lets a process ask for them."""
    if _huge_pages_are_allowed():
        for run in runs(blocks):
            _libc.madvise(int(run[0]) * HUGE_PAGE_BYTES, len(run) * HUGE_PAGE_BYTES, _MADV_HUGEPAGE)


def present_pages(block: int) -> int:
    """How many pages of a block are there; 0 if not all of it is memory."""
    pages = (ctypes.c_uint8 * _BLOCK_PAGES)()
    if _libc.mincore(block * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, pages) != 0:
        return 0
    return bytes(pages).count(1)


@functools.cache
def _huge_pages_are_allowed() -> bool:
    """Whether the machine lets a process ask for them; putting them together would not ask again."""
    with suppress(OSError):
        return "[never]" not in _HUGE_PAGES.read_text(encoding="ascii")
    return False


def populate(address: int, nbytes: int, *, writing: bool = True) -> None:
    """Fault in the pages of a mapping, so that whoever uses them first need not.

    Other threads run meanwhile. A kernel that cannot do it leaves it to the first use.

    Raises
    ------
    OSError
        If there are not enough pages.
    """
    advice = _MADV_POPULATE_WRITE if writing else _MADV_POPULATE_READ
    if _libc.madvise(address, nbytes, advice) != 0:
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, f"madvise({address:#x}, {nbytes}, {advice}) failed to populate")


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


def enclosing(addresses: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """For each address where the range ``(address, nbytes)`` around it begins; itself if there is none.

    The ranges do not overlap.
    """
    ordered = sorted(ranges)
    found = []
    for address in addresses:
        index = bisect.bisect_right(ordered, (address, sys.maxsize)) - 1
        start, nbytes = ordered[index] if index >= 0 else (address, 0)
        found.append(start if address < start + nbytes else address)
    return found


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """The whole pages inside a range, as ``(address, nbytes)``; ``nbytes`` may be 0."""
    first = -(-address // PAGE_BYTES) * PAGE_BYTES
    last = (address + nbytes) // PAGE_BYTES * PAGE_BYTES
    return first, max(0, last - first)


def drop_pages(address: int, nbytes: int) -> None:
    """Give the whole pages inside a range back to the kernel; they read as zeros afterwards.

    Raises
    ------
    OSError
        If the kernel refuses, for instance because the pages are locked.
    """
    first, length = whole_pages(address, nbytes)
    if length and _libc.madvise(first, length, _MADV_DONTNEED) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise({first:#x}, {length}, MADV_DONTNEED) failed")


@functools.cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(_libc, "malloc_trim", None)  # glibc has it, musl does not


def trim_heap() -> None:
    """Make the C allocator return freed pages to the kernel, also those below the heap's top."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    plain: bool


class AddressSpace:
    """``/proc/self/maps`` at the first question: which ranges are private, anonymous and writable."""

    @functools.cached_property
    def _mappings(self) -> list[_Mapping]:
        return list(_read_mappings())

    def is_plain(self, address: int, nbytes: int) -> bool:
        """Whether all of a range is private, anonymous and writable: dropping its pages is ours alone."""
        end = address + nbytes
        index = bisect.bisect_right(self._mappings, address, key=lambda mapping: mapping.start) - 1
        while 0 <= index < len(self._mappings) and address < end:
            mapping = self._mappings[index]
            if not mapping.plain or not mapping.start <= address < mapping.end:
                return False
            address = mapping.end
            index += 1
        return address >= end


def _read_mappings() -> Iterator[_Mapping]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, permissions, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        anonymous = inode == "0" and (not name or name[0].startswith(("[heap]", "[anon:")))
        yield _Mapping(start, end, permissions == "rw-p" and anonymous)
