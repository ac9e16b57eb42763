"""Checksums of chunks as a device is asked for them, and as xxHash itself computes them."""

from __future__ import annotations

from xxhash import xxh3_128_intdigest

from gpuslice.kernels.host.copies import CHUNK_BYTES
from gpuslice.kernels.transfer import Pairs

#: To a multiple of this a chunk is padded, as a small storage's is.
_ALIGN_BYTES = 256


def padded(nbytes: int) -> int:
    """Bytes of a chunk with its padding."""
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Remembered:
    """`Checksums` of an arena's last copy.

    Attributes
    ----------
    sums, told
        By offset, of the chunks that were told: checksum and bytes.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._nbytes = {
            offset + at: min(CHUNK_BYTES, storage.nbytes() - at)
            for storage, offset in pairs
            for at in range(0, storage.nbytes(), CHUNK_BYTES)
        }
        self.sums: dict[int, int] = {}
        self.told: dict[int, int] = {}

    def padded(self, offset: int) -> int:
        return padded(self._nbytes[offset])

    def note(self, offset: int, nbytes: int, checksum: int) -> bool:
        assert nbytes == self._nbytes[offset]
        self.told[offset] = nbytes
        known = self.sums.get(offset) == checksum
        self.sums[offset] = checksum
        return known


def checksum_reference(data: bytes, length: int | None = None) -> int:
    """XXH3-128 of bytes that are followed by zeros up to a length."""
    return xxh3_128_intdigest(data.ljust(padded(len(data)) if length is None else length, b"\0"))
