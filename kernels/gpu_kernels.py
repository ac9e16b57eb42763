"""The GPU kernels of pack.cu and digest.cu, loaded by CuPy, and the same arithmetic in NumPy.

CuPy comes with the extras ``cu12`` and ``cu13``; nothing here is needed without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuslice.errors import EnvironmentUnusableError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("pack.cu", "digest.cu"))
#: ``struct Piece`` of pack.cu.
PIECE = np.dtype([("address", np.uint64), ("offset", np.uint64), ("nbytes", np.uint64)])

_THREADS = 256
#: Blocks per piece, and pieces at a time (the limit of a grid's y).
_BLOCKS, _MOST_PIECES = 64, 65_535
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class GpuKernels:
    """The compiled kernels on the current CUDA device.

    Raises
    ------
    EnvironmentUnusableError
        If CuPy is not installed.
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
        self._module = cupy.RawModule(code=code, options=("-std=c++17",))

    def gather(self, pieces: Sequence[tuple[int, int, int]], staging: int, stream: Any = None) -> None:
        """Copy pieces of device memory into a staging buffer on the device, in stream order.

        Parameters
        ----------
        pieces
            (device address, offset in the buffer, bytes) of each.
        staging
            Device address of the buffer.
        stream
            A CuPy stream; the current one by default.
        """
        self._pack("gather", pieces, staging, stream)

    def scatter(self, pieces: Sequence[tuple[int, int, int]], staging: int, stream: Any = None) -> None:
        """The way back of `gather`."""
        self._pack("scatter", pieces, staging, stream)

    def digest(
        self, address: int, nbytes: int, chunk_bytes: int, stream: Any = None
    ) -> npt.NDArray[np.uint64]:
        """Digests of the chunks of a device buffer, see digest.cu; waits for them.

        Parameters
        ----------
        address
            A multiple of 8.
        chunk_bytes
            A multiple of 8; the last chunk may be shorter.

        Returns
        -------
        ndarray of uint64, shape (chunks,)
        """
        chunks = -(-nbytes // chunk_bytes)
        with stream or self._cupy.cuda.get_current_stream():
            digests = self._cupy.zeros(chunks, dtype=np.uint64)
            arguments = (np.uint64(address), np.uint64(nbytes), np.uint64(chunk_bytes), digests)
            if chunks:
                self._module.get_function("digest")((min(chunks, _MOST_PIECES),), (_THREADS,), arguments)
            return np.asarray(digests.get(), dtype=np.uint64)

    def _pack(self, name: str, pieces: Sequence[tuple[int, int, int]], staging: int, stream: Any) -> None:
        if not pieces:
            return
        with stream or self._cupy.cuda.get_current_stream():
            table = self._cupy.asarray(np.array(list(pieces), dtype=PIECE).view(np.uint64))
            grid = (_BLOCKS, min(len(pieces), _MOST_PIECES))
            arguments = (table, np.uint32(len(pieces)), np.uint64(staging))
            self._module.get_function(name)(grid, (_THREADS,), arguments)


def digest_reference(data: npt.NDArray[np.uint8], chunk_bytes: int) -> npt.NDArray[np.uint64]:
    """What the kernel ``digest`` computes, in NumPy.

    Parameters
    ----------
    data
        Shape (bytes,).
    chunk_bytes
        A multiple of 8.

    Returns
    -------
    ndarray of uint64, shape (chunks,)
    """
    starts = range(0, data.size, chunk_bytes)
    return np.array([_digest(data[start : start + chunk_bytes]) for start in starts], dtype=np.uint64)


def _digest(chunk: npt.NDArray[np.uint8]) -> np.uint64:
    words = np.pad(chunk, (0, -chunk.size % 8)).view("<u8").astype(np.uint64)
    places = np.arange(1, words.size + 1, dtype=np.uint64) * _GOLDEN
    terms = _mix(np.append(words ^ places, np.uint64(chunk.size)))
    return np.uint64(np.add.reduce(terms))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
