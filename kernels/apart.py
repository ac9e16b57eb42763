"""Memory for a state's storages, apart from all else that the process allocates.

glibc serves a thread from an arena of its own, which consists of heaps of 64 MiB. What one thread alone takes
there lies together: no small object of Python's or torch's, living on between two storages, keeps a huge page
from being whole, and giving the memory back is unmapping heaps. So all but small storages are taken in a
thread that takes little else. Another C library, or a thread that shares its arena, gives memory all the
same, in pieces. What becomes of the place where they were made is said in ``mainheap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from . import copying, mainheap, malloc
from .host import HUGE_PAGE_BYTES, ask_for_huge_pages, collapse

#: From this size on a storage is taken apart; smaller ones are many, and few bytes.
LARGE_BYTES = malloc.USUAL_BYTES
#: glibc's ``HEAP_MAX_SIZE`` on 64-bit machines; a heap begins at a multiple of it.
HEAP_BYTES = 64 << 20
#: Where in a heap the first storage begins at the latest: behind the arena's own data, in its first heap.
_HEAD_BYTES = 64 << 10

_Sized = TypeVar("_Sized", bound=tuple[Any, ...])
#: As `begun` says.
_begun: list[int] = []


def by_size(wanted: Sequence[_Sized]) -> tuple[list[_Sized], list[_Sized]]:
    """The large and the small ones of what has its bytes in the second place."""
    large = [one for one in wanted if one[1] >= LARGE_BYTES]
    return large, [one for one in wanted if one[1] < LARGE_BYTES]


def take_apart(take: Callable[[list[_Sized]], None], large: list[_Sized]) -> None:
    """Have a thread that exists for this alone take these, and wait for its end, whatever arrives meanwhile.

    Raises
    ------
    BaseException
        What ``take`` raises, or what arrived.
    """
    _begun.clear()
    if not large:
        return
    failures: list[BaseException] = []

    def work() -> None:
        try:
            if not failures:
                take(large)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(error)

    (thread,) = copying.others(work, 2)
    with _whole_heaps([nbytes for _, nbytes, *_ in large]):
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, when the thread has ended
            failures.append(error)
        copying.wait_for([thread], failures)
    if failures:
        raise failures[0]


def give(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Its bytes; if it is the first large one of a heap, what follows it there comes in huge pages."""
    storage.resize_(nbytes)
    start = storage.data_ptr() % HEAP_BYTES
    if start < _HEAD_BYTES and nbytes >= LARGE_BYTES:
        heap = storage.data_ptr() - start
        ask_for_huge_pages(heap, HEAP_BYTES)
        for header in (heap, storage.data_ptr() + nbytes):  # malloc has written there
            collapse(header - header % HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
        _begun.append(heap)


def begun() -> list[int]:
    """Where the heaps begin that were begun since the last `take_apart` began: all of them in huge pages."""
    return _begun


@contextmanager
def _whole_heaps(sizes: Sequence[int]) -> Iterator[None]:
    """Meanwhile a heap is made as large as it can be, so that no header is written where it ends for now."""
    if malloc.may_set():
        malloc.tell(malloc.MMAP_THRESHOLD, malloc.MAPPED_BYTES)
        mainheap.settle(sizes)
    with malloc.meanwhile(malloc.TOP_PAD, HEAP_BYTES, malloc.USUAL_BYTES):
        yield


def emptied_heaps() -> AbstractContextManager[None]:
    """Meanwhile what becomes free at the end of a heap is given back to the kernel."""
    return malloc.meanwhile(malloc.TRIM_THRESHOLD, malloc.USUAL_BYTES, malloc.KEPT_BYTES)
