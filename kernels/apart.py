"""Memory for a state's storages, apart from all else that the process allocates.

glibc serves a thread from an arena of its own, which consists of heaps of 64 MiB. What one thread alone takes
there lies together: no small object of Python's or torch's, living on between two storages, keeps a huge page
from being whole, and giving the memory back is unmapping heaps. So all but small storages are taken in a
thread that takes nothing else. Another C library, or a thread that shares its arena, gives memory all the
same, in pieces. What becomes of the place where they were made is said in ``mainheap``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from . import mainheap, malloc
from .host import HUGE_PAGE_BYTES, ask_for_huge_pages, collapse

#: From this size on a storage is taken apart; smaller ones are many, and few bytes.
LARGE_BYTES = malloc.USUAL_BYTES
#: glibc's ``HEAP_MAX_SIZE`` on 64-bit machines; a heap begins at a multiple of it.
HEAP_BYTES = 64 << 20
#: Where in a heap the first storage begins at the latest: behind the arena's own data and the thread's cache,
#: in the first one.
_HEAD_BYTES = 512 << 10

_Sized = TypeVar("_Sized", bound=tuple[Any, ...])
#: As `begun` says.
_begun: list[int] = []


def by_size(wanted: Sequence[_Sized]) -> tuple[list[_Sized], list[_Sized]]:
    """The large and the small ones of what has its bytes in the second place."""
    large = [one for one in wanted if one[1] >= LARGE_BYTES]
    return large, [one for one in wanted if one[1] < LARGE_BYTES]


class _Taker:
    """The thread that takes. It waits for work all its life, so that no other thread comes by its heaps."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, name="gpuslice-apart", daemon=True).start()

    def _run(self) -> None:
        malloc.fill_cache()
        while True:
            self._work.get()()  # without a name, by which it would stay alive

    def do(self, work: Callable[[], object], failures: list[BaseException]) -> None:
        """Return when it is done, or never will be; whatever arrives meanwhile is noted as a failure."""
        try:
            self._work.put(work)
        except BaseException as error:  # noqa: BLE001 - raised by the caller afterwards
            failures.append(error)
        while True:
            try:
                done = threading.Event()
                self._work.put(done.set)  # one after the other: the work, if it came there, is over then
                done.wait()
                return
            except BaseException as error:  # noqa: BLE001 - as above
                failures.append(error)


#: The process's own; a forked one has none of its parent's threads.
_takers: list[_Taker] = []
os.register_at_fork(after_in_child=_takers.clear)


def take_apart(take: Callable[[list[_Sized]], None], large: list[_Sized]) -> None:
    """Have a thread that exists for this alone take these, and wait for that, whatever arrives meanwhile.

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

    with _whole_heaps([nbytes for _, nbytes, *_ in large]):
        try:
            if not _takers:
                _takers.append(_Taker())
        except RuntimeError:  # the system gives no more threads
            work()
        else:
            _takers[0].do(work, failures)
    if failures:
        raise failures[0]


def give(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Its bytes; if it is the first large one of a heap, what follows it there comes in huge pages."""
    storage.resize_(nbytes)
    if nbytes < LARGE_BYTES:
        return
    start = storage.data_ptr() % HEAP_BYTES
    heap = storage.data_ptr() - start
    if start < _HEAD_BYTES and heap not in _begun:
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
