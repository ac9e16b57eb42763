"""What glibc's malloc can be told, and where its heap lies. Other allocators ignore it."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: From here on memory gets a mapping of its own: where glibc's threshold ends that grows by itself.
OWN_MAPPING_BYTES = 32 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_DEFAULT_TOP_PAD_BYTES = 128 << 10
_LARGEST_INT = (1 << 31) - 1
_START_BRK = 46  # the position of start_brk in /proc/self/stat, proc(5)

_libc = ctypes.CDLL(None)
_libc.sbrk.argtypes, _libc.sbrk.restype = [ctypes.c_long], ctypes.c_void_p


@functools.cache
def heap_start() -> int:
    """Where the memory begins that the main thread's malloc extends."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return int(fields[_START_BRK - 2])


def heap_end() -> int:
    """Where it ends now."""
    return _libc.sbrk(0) or 0


@contextmanager
def growing_by(nbytes: int) -> Iterator[None]:
    """Meanwhile the heap grows, if it has to, by so many bytes at once."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_TOP_PAD, min(max(nbytes, _DEFAULT_TOP_PAD_BYTES), _LARGEST_INT))
    try:
        yield
    finally:
        mallopt(_M_TOP_PAD, _DEFAULT_TOP_PAD_BYTES)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """``mallopt(3)``; ``None`` where there is none, or who started the process has tuned malloc already.

    Its first use ends that glibc adapts the thresholds by itself, so they are set to where that would end.
    """
    tuned = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    if tuned or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    mallopt: Callable[[int, int], int] | None = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * OWN_MAPPING_BYTES)
    return mallopt
