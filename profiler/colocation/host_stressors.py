"""Loads of one kind on the host. A unit takes about a millisecond on an idle core.

Imports numba, which caches the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Bytes streamed through, and bytes per unit: far beyond any cache.
_STREAM_BYTES, _PIECE_BYTES = 96 << 20, 4 << 20
#: Size of the last cache if the system does not tell it; and the most that is used of a very large one.
_USUAL_CACHE_BYTES, _MOST_CACHE_BYTES = 16 << 20, 32 << 20
_COMPUTE_ROUNDS, _CACHE_ROUNDS = 250_000, 60_000
_FLOAT_BYTES = 8

_jit: Any = numba.njit(cache=True, nogil=True)


@_jit  # type: ignore[untyped-decorator]
def _compute(rounds: int, start: float) -> float:
    """Run dependent multiplications and additions in registers."""
    a, b, c, d = start, start + 1.0, start + 2.0, start + 3.0
    for _ in range(rounds):
        a = a * 0.999999 + 1e-6
        b = b * 0.999999 + 1e-6
        c = c * 0.999999 + 1e-6
        d = d * 0.999999 + 1e-6
    return a + b + c + d


@_jit  # type: ignore[untyped-decorator]
def _stream(to: np.ndarray[Any, Any], one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    """Compute the triad of the STREAM benchmark (McCalpin, 1995)."""
    for i in range(to.size):
        to[i] = one[i] + 3.0 * other[i]


@_jit  # type: ignore[untyped-decorator]
def _visit(buffer: np.ndarray[Any, Any], rounds: int, state: int) -> int:
    """Read and write one place after the other, in an order that no prefetcher can follow."""
    mask = buffer.size - 1
    for _ in range(rounds):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        buffer[state & mask] += 1
    return state


def last_cache_bytes() -> int:
    """Return the size of the last-level cache, rounded down to a power of two."""
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    size = min(max(sizes, default=_USUAL_CACHE_BYTES), _MOST_CACHE_BYTES)
    return 1 << (size.bit_length() - 1)


def _compute_unit() -> Callable[[], None]:
    def unit() -> None:
        _compute(_COMPUTE_ROUNDS, 1.0)

    return unit


def _bandwidth_unit() -> Callable[[], None]:
    count, piece = _STREAM_BYTES // 3 // _FLOAT_BYTES, _PIECE_BYTES // 3 // _FLOAT_BYTES
    to, one, other = np.zeros(count), np.ones(count), np.ones(count)
    at = [0]

    def unit() -> None:
        here = slice(at[0], at[0] + piece)
        _stream(to[here], one[here], other[here])
        at[0] = (at[0] + piece) % (count - piece)

    return unit


def _cache_unit() -> Callable[[], None]:
    buffer = np.zeros(last_cache_bytes() // _FLOAT_BYTES, dtype=np.int64)
    state = [1]

    def unit() -> None:
        state[0] = _visit(buffer, _CACHE_ROUNDS, state[0])

    return unit


#: Makes a unit of each kind of load.
STRESSORS: dict[str, Callable[[], Callable[[], None]]] = {
    "bandwidth": _bandwidth_unit,
    "compute": _compute_unit,
    "cache": _cache_unit,
}
