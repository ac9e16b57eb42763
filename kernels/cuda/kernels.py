"""The GPU kernels of pack.cu and checksum.cu, loaded by CuPy.

CuPy comes with the extras ``cu12`` and ``cu13``; without a GPU nothing here is needed. CuPy compiles and
launches only: all memory is the caller's, so CuPy's own pool stays empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuslice.errors import EnvironmentUnusableError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("pack.cu", "checksum.cu"))
KERNELS = ("gather", "scatter", "checksum")
#: ``struct Piece`` of pack.cu.
PIECE = np.dtype([("address", np.uint64), ("offset", np.uint64), ("nbytes", np.uint64)])

#: (device address, offset in the staging buffer, bytes)
Pieces = Sequence[tuple[int, int, int]]

_THREADS = 256
#: Bytes per thread before another block is launched: four vectors.
_BYTES_PER_THREAD = 64
#: Blocks per piece at most, and pieces at a time (the limit of a grid's y).
_MOST_BLOCKS, _MOST_PIECES = 64, 65_535
#: For ``checksum``: threads per piece, and per block. Small blocks spread few pieces over the GPU.
_SUMMING, _SUMMING_THREADS = 4, 32


class GpuKernels:
    """The kernels, compiled for the current CUDA device. Use them with that device current.

    Raises
    ------
    EnvironmentUnusableError
        If CuPy is not installed, or cannot compile for this device.
    """

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise EnvironmentUnusableError(
                "the GPU kernels need CuPy", "install gpuslice[cu12] or gpuslice[cu13]"
            ) from error
        self._cupy = cupy
        code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
        module = cupy.RawModule(code=code, options=("-std=c++17",))
        try:
            self._functions = {name: module.get_function(name) for name in KERNELS}
        except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EnvironmentUnusableError(
                f"CuPy {cupy.__version__} cannot compile the GPU kernels: {first_line}",
                "install the CuPy extra for torch's CUDA, see `gpuslice doctor`",
            ) from error

    def launch(self, name: str, table: int, pieces: Pieces, target: int, stream: int) -> None:
        """Launch one kernel of `KERNELS` over pieces of device memory.

        Parameters
        ----------
        name
            ``gather`` or ``scatter``, between the pieces and a staging buffer at their offsets in it; or
            ``checksum``, which adds those of pieces at multiples of 16, whose offsets are their lengths with
            padding, to two zeroed 64-bit words for each; see `combine`.
        table
            Device address of ``table(pieces)``.
        target
            Device address of the staging buffer, or of the words.
        stream
            Handle of the CUDA stream in whose order it happens.
        """
        arguments = (np.uint64(table), np.uint32(len(pieces)), np.uint64(target))
        with self._stream(stream):
            grid, threads = shape_of(name, pieces)
            self._functions[name](grid, (threads,), arguments)

    def _stream(self, handle: int) -> Any:
        cuda = self._cupy.cuda
        if hasattr(cuda.Stream, "from_external"):  # CuPy 14
            return cuda.Stream.from_external(_ForeignStream(handle))
        return cuda.ExternalStream(handle)


class _ForeignStream:
    """A stream in the form in which libraries exchange streams (CUDA stream protocol)."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def shape_of(name: str, pieces: Pieces) -> tuple[tuple[int, int], int]:
    """Return grid and threads per block of one launch, for the largest piece and within CUDA's limits."""
    if name == "checksum":
        return (max(1, -(-_SUMMING * len(pieces) // _SUMMING_THREADS)), 1), _SUMMING_THREADS
    widest_bytes = max((nbytes for _, _, nbytes in pieces), default=0)
    blocks = -(-widest_bytes // (_THREADS * _BYTES_PER_THREAD))
    return (min(max(blocks, 1), _MOST_BLOCKS), min(max(len(pieces), 1), _MOST_PIECES)), _THREADS


def table(pieces: Pieces) -> npt.NDArray[np.int64]:
    """Return pieces as the kernels read them. The type is int64, because torch can hold that.

    Returns
    -------
    ndarray of int64, shape (3 * pieces,)
    """
    return np.array(list(pieces), dtype=PIECE).view(np.int64)


def combine(words: npt.NDArray[np.uint64]) -> list[int]:
    """Return the XXH3-128 of each piece from the words that ``checksum`` wrote, low and high alternating.

    Parameters
    ----------
    words
        Shape (2 * pieces,).
    """
    words = words ^ (words >> np.uint64(37))  # XXH3's last step
    words = words * np.uint64(0x165667919E3779F9)
    words ^= words >> np.uint64(32)
    low, high = words[0::2].tolist(), words[1::2].tolist()
    return [below | above << 64 for below, above in zip(low, high, strict=True)]
