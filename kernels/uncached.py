"""Copies past the caches, by a few lines of C, where there is a compiler for them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from gpuslice.errors import EnvironmentUnusableError

from .compiler import shared_library

#: Less than this is still in the cache when somebody reads it next, and had better be copied through it.
SMALLEST_BYTES = 32 << 20

#: Target, source, bytes.
Move = Callable[[int, int, int], object]


@functools.cache
def load() -> tuple[Move | None, str]:
    """The copy, which lets go of the GIL; or ``None`` and why there is none. Compiles at the first call."""
    try:
        library = ctypes.CDLL(str(shared_library(Path(__file__).with_name("copying.c"))))
    except (EnvironmentUnusableError, OSError) as error:
        return None, f"copies go through the caches: {error}"
    move = library.uncached_copy
    move.argtypes, move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return move, ""
