"""Copies of an arena's chunks, whose checksums are taken or compared on the way: by C for many at once.

Thousands of small storages would otherwise pass through Python one after the other, each with the GIL. The C
code (copies.c) calls the hash functions of the xxhash package itself, which exports them; where it does
not, or there is no compiler, Python does the same.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_intdigest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels.compiler import shared_library

#: XXH3-128 of a chunk: lower and upper half, and whether it is known.
ROW = np.dtype([("low", np.uint64), ("high", np.uint64), ("known", np.uint64)])
_LOWER_HALF = (1 << 64) - 1
_HALF_BITS = 64
_MODULE = "xxhash._xxhash"
_PROBE = bytes(range(256)) * 20
_Table = np.ndarray[Any, Any]
#: Columns of the rows that a `Copier` takes (``struct chunk``).
SOURCE, TARGET, BYTES, PADDED, INDEX = range(5)


def rows(source: _Table, target: _Table, nbytes: _Table, padded_bytes: _Table, index: _Table) -> _Table:
    """Chunks as a `Copier` takes them.

    Parameters
    ----------
    index
        Which of the arena's chunks each is.
    """
    return np.stack((source, target, nbytes, padded_bytes, index), axis=1).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class Sums:
    """The checksums of an arena's chunks.

    Attributes
    ----------
    chunks
        Start and end of every chunk, ascending; shape ``(n, 2)``. The end is that of the padding.
    before, now
        Rows of `ROW`: what the arena had until now, and what a copy finds.
    """

    chunks: _Table
    before: _Table
    now: _Table

    def note(self, index: int, value: int) -> bool:
        """Note the checksum of a chunk; whether it is another one than before."""
        row = (value & _LOWER_HALF, value >> _HALF_BITS, 1)
        self.now[index] = row
        return bool(self.before[index].item() != row)


@dataclass(frozen=True, slots=True)
class Expected:
    """What an arena's chunks should be.

    Attributes
    ----------
    chunks
        As of `Sums`; none is shorter than 256 bytes.
    lows
        XXH3-64 of each, which for as many bytes is the lower half of XXH3-128.
    damaged
        Makes the error for a chunk that is something else, from its offset.
    """

    chunks: _Table
    lows: _Table
    damaged: Callable[[int], Exception]


class Copier:
    """Copies many chunks without the GIL, as `rows` has them."""

    def __init__(self, library: ctypes.CDLL, hasher: ctypes.Array[ctypes.c_void_p]) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._hasher = hasher
        self._changed, self._expected = library.copy_changed, library.copy_expected
        self._changed.restype = ctypes.c_int64
        self._changed.argtypes = (pointer, pointer, size, pointer, pointer)
        self._expected.restype = size
        self._expected.argtypes = (pointer, pointer, size, pointer)

    @staticmethod
    def _refuse(chunks: _Table, expected: Expected, position: int) -> None:
        """Raise for the chunk at ``position``, if there is one."""
        if position < len(chunks):
            raise expected.damaged(int(expected.chunks[int(chunks[position, INDEX]), 0]))

    def copy_changed(self, chunks: _Table, sums: Sums) -> int:
        """Note all checksums, and copy what has another one than before; returns the bytes let be."""
        unchanged_bytes: int = self._changed(
            self._hasher,
            chunks.ctypes.data,
            len(chunks),
            sums.before.ctypes.data,
            sums.now.ctypes.data,
        )
        if unchanged_bytes < 0:
            raise MemoryError("there is no memory for a checksum")
        return unchanged_bytes

    def copy_expected(self, chunks: _Table, expected: Expected | None) -> None:
        """Copy chunks that are what they should be; ``None``: whatever they are.

        Raises
        ------
        Exception
            ``expected.damaged``, for the first one that is not; it and what follows are not copied.
        """
        position: int = self._expected(self._hasher, chunks.ctypes.data, len(chunks), _lows(expected))
        if expected is not None:
            self._refuse(chunks, expected, position)


def _lows(expected: Expected | None) -> int | None:
    return None if expected is None else expected.lows.ctypes.data


@functools.cache
def load() -> tuple[Copier | None, str]:
    """The copies in C; or ``None`` and why there are none. Compiles at the first call."""
    try:
        library = ctypes.CDLL(str(shared_library(Path(__file__).with_name("copies.c"))))
        copier = Copier(library, _hasher())
    except (EnvironmentUnusableError, ImportError, OSError, AttributeError) as error:
        return None, f"chunks are copied one by one: {error}"
    if not _agrees(copier):
        return None, "chunks are copied one by one: xxhash's functions are not what they seem"
    return copier, ""


def _hasher() -> ctypes.Array[ctypes.c_void_p]:
    """``struct hasher``: the functions that xxhash's own module has, the fastest for this processor."""
    library = ctypes.CDLL(importlib.import_module(_MODULE).__file__)
    names: tuple[Sequence[str], ...] = (
        ("XXH3_128bits_dispatch", "XXH3_128bits"),
        ("XXH3_createState",),
        ("XXH3_128bits_reset",),
        ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
        ("XXH3_128bits_digest",),
        ("XXH3_freeState",),
    )
    found = [next((name for name in several if hasattr(library, name)), several[0]) for several in names]
    return (ctypes.c_void_p * len(names))(
        *(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in found)
    )


def _agrees(copier: Copier) -> bool:
    """Whether it copies and hashes as the package does, with padding and without."""
    source, target = np.frombuffer(_PROBE, np.uint8), np.ones(2 * len(_PROBE), np.uint8)
    sums = Sums(np.zeros((2, 2), np.int64), np.zeros(2, ROW), np.zeros(2, ROW))
    sizes = [(len(_PROBE), len(_PROBE)), (len(_PROBE) - 300, len(_PROBE))]
    for row, (nbytes, padded) in enumerate(sizes):
        chunk = np.array([[source.ctypes.data, target.ctypes.data, nbytes, padded, row]], np.uint64)
        copier.copy_changed(chunk, sums)
        expected = _PROBE[:nbytes].ljust(padded, b"\0")
        if target[:padded].tobytes() != expected:
            return False
        value = xxh3_128_intdigest(expected)
        if sums.now[row].item() != (value & _LOWER_HALF, value >> _HALF_BITS, 1):
            return False
    return True
