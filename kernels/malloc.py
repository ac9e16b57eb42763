"""What glibc's malloc can be told and asked; another C library's is left as it is.

So is glibc's where whoever started the process has set it up himself (``MALLOC_*``, ``GLIBC_TUNABLES``).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Of mallopt(3).
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
#: What the free end of a heap keeps, what a heap grows by beyond what is asked for, and from which size on a
#: piece is a mapping of its own, if nobody says anything else.
USUAL_BYTES = 128 << 10
#: The most to which it raises the last and the first of these by itself: those of a program that has once
#: freed a piece of 32 MiB.
MAPPED_BYTES, KEPT_BYTES = 32 << 20, 64 << 20
#: The most that it can be told.
MOST_BYTES = (1 << 31) - 1
#: What a thread's own cache of freed pieces has room for (tcache, since glibc 2.26).
_CACHED_SIZES, _CACHED_EACH = range(24, 1033, 16), 7

_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_ssize_t
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


class _Books(ctypes.Structure):
    """``struct mallinfo2`` of mallinfo(3)."""

    _fields_ = [(f"_{number}", ctypes.c_size_t) for number in range(9)] + [("keepcost", ctypes.c_size_t)]


if hasattr(_libc, "mallinfo2"):
    _libc.mallinfo2.restype = _Books


@functools.cache
def may_set() -> bool:
    """Whether it is told anything."""
    tuned = any(name.startswith("MALLOC_") for name in os.environ)
    tuned = tuned or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return not tuned and hasattr(_libc, "mallopt") and hasattr(_libc, "mallinfo2")


def tell(parameter: int, nbytes: int) -> None:
    """Set one of the parameters above; only if `may_set`."""
    _libc.mallopt(parameter, nbytes)


@contextmanager
def meanwhile(parameter: int, nbytes: int, afterwards_bytes: int) -> Iterator[None]:
    """Have it set up so, if it may be."""
    if not may_set():
        yield
        return
    try:
        tell(parameter, nbytes)
        yield
    finally:
        tell(parameter, afterwards_bytes)


def trim() -> None:
    """Have freed pages returned to the kernel, also those below a heap's top. musl keeps them."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def take(nbytes: int) -> int:
    """Address of a new piece; 0 if there is none."""
    return _libc.malloc(nbytes) or 0


def give_back(address: int) -> None:
    """Free a piece."""
    _libc.free(address)


def fill_cache() -> None:
    """Have the calling thread's cache of freed pieces full, of pieces that lie together.

    A thread keeps so many of each size for itself; heaps in which one of them lies cannot be given back.
    """
    if may_set():
        for piece in [take(nbytes) for nbytes in _CACHED_SIZES for _ in range(_CACHED_EACH)]:
            give_back(piece)


@functools.cache
def main_heap_start() -> int:
    """Where the heap of the main thread's arena begins; 0 if there is none yet."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.endswith("[heap]"):
            return int(line.partition("-")[0], 16)
    return 0


def main_heap_end() -> int:
    """Where it ends now."""
    end: int = _libc.sbrk(0)
    return end


def free_end_bytes() -> int:
    """How much of the main heap's end is free (its "top"); glibc's only."""
    end_bytes: int = _libc.mallinfo2().keepcost
    return end_bytes
