"""Memory that storages are given anew, some of it cleared by all threads ahead of the C allocator's headers.

The page fault of a header clears 2 MiB by one thread, or leaves that block with small pages. But the
allocator often goes on where the last storage ends, in its heap, which glibc is told to extend at once by
all that is needed. So it is known where the next headers would be, and these blocks are faulted in first: of
all that follow where the heap has just grown, otherwise of as much as lay in sequence until then. All other
blocks are faulted in as they are filled; so are these where that guess is wrong, with another allocator, or
in a thread with a heap of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from . import glibc
from .copying import run
from .host import HUGE_PAGE_BYTES, populate, present_pages, put_behind_huge_pages, runs, trim_heap

Wanted = Sequence[tuple[torch.UntypedStorage, int]]
#: Smaller storages come from anywhere, and say nothing about where the next one will lie.
_SMALL_BYTES = 64 << 10
#: What one thread faults in at a time.
_PORTION_BLOCKS = 4
#: Of the allocator, between two storages: a header, and what it loses by aligning the second.
_GAP_BYTES = 64


def take(wanted: Wanted, threads: int) -> None:
    """Resize empty storages to so many bytes, which are filled right after this.

    Raises
    ------
    RuntimeError
        If there is no memory for one of them; those before it have theirs.
    """
    try:
        _take_in_sequence(wanted, threads)
    except RuntimeError:  # there may be a limit that all at once goes beyond
        trim_heap()
        for storage, nbytes in wanted:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)


def _take_in_sequence(wanted: Wanted, threads: int) -> None:
    sizes = [nbytes for _, nbytes in wanted if _SMALL_BYTES <= nbytes < glibc.OWN_MAPPING_BYTES]
    heap = _Heap(sizes, threads)
    with glibc.growing_by(sum(sizes) + 2 * _GAP_BYTES * len(wanted)):
        for storage, nbytes in wanted:
            storage.resize_(nbytes)
            if _SMALL_BYTES <= nbytes < glibc.OWN_MAPPING_BYTES:
                heap.gave(storage.data_ptr(), nbytes)


class _Heap:
    """Sees where storages get their memory, and faults in where the next ones would begin.

    Parameters
    ----------
    sizes
        Bytes of all of them, in the order in which they get it.
    """

    def __init__(self, sizes: Sequence[int], threads: int) -> None:
        #: Where each would begin if they followed each other from 0 on, and the last one end.
        self._places = np.cumsum(np.array([0, *sizes], np.int64) + _GAP_BYTES) - _GAP_BYTES
        self._threads = threads
        self._given = 0
        self._start, self._end = glibc.heap_start(), glibc.heap_end()
        #: Of those that lie in sequence; and how many have been looked after.
        self._first = self._last = 0
        self._ready = 0

    def gave(self, address: int, nbytes: int) -> None:
        """The next storage got its memory here."""
        self._given += 1
        grown = address >= self._end and self._grow()
        if not self._start <= address < self._end:
            return
        follows = 0 <= address - self._last < _SMALL_BYTES
        self._last = address + nbytes
        if not follows:
            self._first, self._ready = address, 0
        if grown:
            self._look_ahead(int(self._places[-1]))
        elif follows and self._given >= self._ready:
            self._look_ahead(self._last - self._first)

    def _look_ahead(self, nbytes: int) -> None:
        """Fault in where those will begin that lie within so many bytes behind the last one."""
        places = self._places[self._given : -1] - self._places[self._given] + self._last + _GAP_BYTES
        places = places[places < min(self._last + nbytes, self._end)]
        self._ready = self._given + len(places)
        _fault_in(np.unique(places // HUGE_PAGE_BYTES), self._threads)

    def _grow(self) -> bool:
        """Whether the heap has grown: then no header but those of the last storage has been written there."""
        before, self._end = self._end, glibc.heap_end()
        put_behind_huge_pages(np.arange(before // HUGE_PAGE_BYTES, self._end // HUGE_PAGE_BYTES))
        return self._end > before


def _fault_in(blocks: np.ndarray[Any, Any], threads: int) -> None:
    absent = blocks[[present_pages(block) == 0 for block in blocks.tolist()]]
    put_behind_huge_pages(absent)

    def populate_all(blocks: np.ndarray[Any, Any]) -> None:
        for part in runs(blocks):
            with suppress(OSError):  # then it is faulted in as it is filled, or that fails as it always did
                populate(int(part[0]) * HUGE_PAGE_BYTES, len(part) * HUGE_PAGE_BYTES)

    portions = (absent[at : at + _PORTION_BLOCKS] for at in range(0, len(absent), _PORTION_BLOCKS))
    run(([portion] for portion in portions), populate_all, threads)
