"""Memory for a state's large storages, apart from all else that the process allocates.

glibc serves a thread from an arena of its own, which consists of heaps of 64 MiB. What one thread alone takes
there lies together: no small object of Python's or torch's, living on between two storages, keeps a huge page
from being whole, and giving the memory back is unmapping heaps. So large storages are taken in a thread that
takes little else. Another C library, or a thread that shares its arena, gives memory all the same, in pieces.
Why small ones are not is said in docs/decisions/host-copies.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import copying
from .host import ask_for_huge_pages

#: From this size on a storage is taken apart.
LARGE_BYTES = 1 << 20
#: glibc's ``HEAP_MAX_SIZE`` on 64-bit machines; a heap begins at a multiple of it.
HEAP_BYTES = 64 << 20
#: Where in a heap the first storage begins at the latest: behind the arena's own data, in its first heap.
_HEAD_BYTES = 64 << 10
#: Of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
#: The most to which glibc by itself raises the size from which a piece is a mapping of its own, and the free
#: memory at a heap's end that it keeps: those of a program that has once freed so large a piece.
_MAPPED_BYTES, _KEPT_BYTES = 32 << 20, 64 << 20
#: What a heap's end keeps, and what it grows by beyond what is asked for, if nobody says anything else.
_USUAL_BYTES = 128 << 10

_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_ssize_t

_Sized = TypeVar("_Sized", bound=tuple[Any, ...])


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
    with _whole_heaps():
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
        ask_for_huge_pages(storage.data_ptr(), HEAP_BYTES - start)


@contextmanager
def _whole_heaps() -> Iterator[None]:
    """Meanwhile a heap is made as large as it can be, so that no header is written where it ends for now."""
    if may_set():
        _set(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        _set(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        _widen_main_heap()
    with _meanwhile(_M_TOP_PAD, HEAP_BYTES, _USUAL_BYTES):
        yield


def emptied_heaps() -> AbstractContextManager[None]:
    """Meanwhile what becomes free at the end of a heap is given back to the kernel."""
    return _meanwhile(_M_TRIM_THRESHOLD, _USUAL_BYTES, _KEPT_BYTES)


@contextmanager
def _meanwhile(parameter: int, nbytes: int, afterwards_bytes: int) -> Iterator[None]:
    """Have malloc set up so, if it may be."""
    if not may_set():
        yield
        return
    try:
        _set(parameter, nbytes)
        yield
    finally:
        _set(parameter, afterwards_bytes)


def _widen_main_heap() -> None:
    """Have the heap of all other threads' arena, as far as it reaches now, come in huge pages.

    Gradients come and go there from now on, a third of a state, where the state has left holes: in small
    pages a suspend would take ten times as long to give them back.
    """
    start = _main_heap_start()
    if start:
        ask_for_huge_pages(start, _libc.sbrk(0) - start)


@functools.cache
def _main_heap_start() -> int:
    """Its address; 0 without one."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.endswith("[heap]"):
            return int(line.partition("-")[0], 16)
    return 0


def _set(parameter: int, nbytes: int) -> None:
    _libc.mallopt(parameter, nbytes)


@functools.cache
def may_set() -> bool:
    """Whether the C library is told anything: not if it is another one, or somebody has set it up himself."""
    tuned = any(name.startswith("MALLOC_") for name in os.environ)
    tuned = tuned or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return not tuned and hasattr(_libc, "mallopt")
