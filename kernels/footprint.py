"""Where storages lay in the C heap: faulted in by several threads, before the heap hands it out again.

The C allocator writes a header before every block that it hands out. In memory whose pages are gone each of
these is a page fault, in huge pages one that clears 2 MiB, all taken by the thread that asks for memory.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from .copying import CHUNK_BYTES, run
from .host import PAGE_BYTES, HugePages, populate

#: Less than this is faulted in sooner than threads are started.
_SMALLEST_BYTES = 16 << 20
#: A little less than the largest block that glibc ever takes from the heap.
_BOLT_BYTES = 31 << 20
_Range = tuple[int, int]

_libc = ctypes.CDLL(None)
_libc.sbrk.argtypes, _libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
_libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
_libc.realloc.argtypes, _libc.realloc.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = [ctypes.c_void_p], None


class Footprint:
    """Remembers where storages lay; the same ones, freed meanwhile, will come to lie there again.

    Freed memory at the top of the heap would be unmapped. So a bolt is kept above the storages.
    """

    def __init__(self) -> None:
        #: Address and end of what lay there, in order and apart from each other.
        self._ranges: list[_Range] = []
        self._nbytes = 0
        self._bolt: _Bolt | None = None
        self._present: list[_Range] = []

    def note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Remember where these lie, as far as that is the heap."""
        end = _heap_end()
        places = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        places = [(address, nbytes) for address, nbytes in places if 0 < address < end]
        self._ranges = list(_joined(places))
        self._nbytes = sum(nbytes for _, nbytes in places)
        top = self._ranges[-1][1] if self._ranges else 0
        if top and (self._bolt is None or self._bolt.address < top):
            self._bolt = None  # before there is another one
            self._bolt = _Bolt()

    def fault_in(self, nbytes: int, threads: int) -> None:
        """Make memory present for storages of ``nbytes`` in all, if no more than that lay here.

        Raises
        ------
        OSError
            If there are not enough pages.
        """
        end = _heap_end() // PAGE_BYTES * PAGE_BYTES
        ranges = [(start, min(stop, end)) for start, stop in self._ranges if start < end]
        self._present = []
        if not _SMALLEST_BYTES <= self._nbytes <= nbytes:
            return
        pages = HugePages((start, stop - start) for start, stop in ranges)

        def fill(portion: _Range) -> None:
            start, stop = portion
            pages.ready(start, stop - start)
            populate(start, stop - start)

        run(_portions(ranges), fill, threads)
        self._present = ranges

    def fresh(self, places: Sequence[_Range]) -> list[_Range]:
        """Those of ``places`` (address, bytes) that `fault_in` has not made present."""
        starts = [start for start, _ in self._present]
        return [place for place in places if not self._has(starts, *place)]

    def _has(self, starts: Sequence[int], address: int, nbytes: int) -> bool:
        index = bisect_right(starts, address) - 1
        return index >= 0 and address + nbytes <= self._present[index][1]


class _Bolt:
    """A page at the end of the heap, which keeps what is below it from being unmapped while it lives."""

    def __init__(self) -> None:
        # Memory of this size comes from the system until some of it has been freed once; after that from the
        # end of the heap, there being hardly that much room in between. It is never touched.
        _libc.free(_libc.malloc(_BOLT_BYTES))
        self.address: int = _libc.realloc(_libc.malloc(_BOLT_BYTES), PAGE_BYTES) or 0

    def __del__(self, free: Callable[[int], None] = _libc.free) -> None:
        free(self.address)


def _heap_end() -> int:
    return _libc.sbrk(0) or 0


def _joined(places: Iterable[_Range]) -> Iterator[_Range]:
    """Ranges from start to end, those that touch but for the allocator's headers in one."""
    start = end = 0
    for address, nbytes in sorted(places):
        if address > end + PAGE_BYTES:
            if end:
                yield start, end
            start = address
        end = max(end, address + nbytes)
    if end:
        yield start, end


def _portions(ranges: Iterable[_Range]) -> Iterator[list[_Range]]:
    """Whole pages, in portions that end where huge pages do."""
    for start, stop in ranges:
        start, stop = start // PAGE_BYTES * PAGE_BYTES, -(-stop // PAGE_BYTES) * PAGE_BYTES
        while start < stop:
            end = min(stop, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
            yield [(start, end)]
            start = end
