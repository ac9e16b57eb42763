"""Marks of chunks: what an arena remembers of them, and the kernel `mark` in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpuslice.kernels.cuda.kernels import combine

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Remembered:
    """Marks of an arena's last copy."""

    def __init__(self) -> None:
        self.marks: dict[int, int] = {}

    def __call__(self, offset: int, mark: int) -> bool:
        known = self.marks.get(offset) == mark
        self.marks[offset] = mark
        return known


def marks_reference(pieces: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    """What the kernel ``mark`` computes, in NumPy: 128 bits for each piece.

    Parameters
    ----------
    pieces
        Each of shape (bytes,).
    """
    return combine(np.concatenate([_mark(piece) for piece in pieces]) if pieces else np.empty(0, np.uint64))


def _mark(piece: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    words = np.pad(piece, (0, -piece.size % 8)).view("<u8").astype(np.uint64)
    places = np.arange(1, words.size + 1, dtype=np.uint64) * _GOLDEN
    low, high = _mix(np.append(words ^ places, np.uint64(piece.size)))
    return np.array([np.add.reduce(low), np.add.reduce(high)], dtype=np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    low = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    high = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return low ^ (low >> np.uint64(31)), high ^ (high >> np.uint64(33))
