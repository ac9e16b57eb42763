"""xxh3 over a mapped snapshot: one digest per chunk; every byte lies in one chunk, and is read once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_digest

#: Two threads reach the memory's bandwidth; below this many bytes starting one costs more than it gains.
_THREADED_BYTES = 16 << 20
_IN_FILES = np.dtype("<u8")

#: xxh3-64 of each chunk, as ``uint64``.
Digests = np.ndarray[Any, np.dtype[np.uint64]]


def fingerprint(data: bytes | memoryview) -> bytes:
    """xxh3-128 of header, metadata or table: 16 bytes, most significant first."""
    return xxh3_128_digest(data)


def digest(data: bytes | memoryview) -> int:
    """xxh3-64 of a chunk."""
    return xxh3_64_intdigest(data)


def pack_digests(digests: Digests) -> bytes:
    """Digests as little-endian u64, the form they have in the file."""
    return digests.astype(_IN_FILES).tobytes()


def unpack_digests(table: bytes, count: int) -> Digests:
    """The first ``count`` digests of a checksum table."""
    return np.ndarray(count, _IN_FILES, table).astype(np.uint64)


def chunk_digests(data: memoryview, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """xxh3-64 of each range of ``data``; xxhash lets go of the GIL meanwhile."""

    def run(part: Sequence[tuple[int, int]]) -> list[int]:
        return [digest(data[start:stop]) for start, stop in part]

    if sum(stop - start for start, stop in ranges) < _THREADED_BYTES or os.cpu_count() == 1:
        return run(ranges)
    middle = len(ranges) // 2
    with ThreadPoolExecutor(1, thread_name_prefix="gpuslice-digest") as pool:
        first = pool.submit(run, ranges[:middle])
        second = run(ranges[middle:])
        return first.result() + second
