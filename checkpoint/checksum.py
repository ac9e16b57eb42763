"""xxh3 over a mapped snapshot: one digest per chunk, one per storage, every byte read once.

The digest of a large storage is taken over its chunks' digests, so it costs nothing more; only the
small storages, packed into common chunks, are read a second time.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from .layout import LARGE_BYTES, Placement, chunk_count, chunks

#: Two threads reach the memory's bandwidth; below this many bytes starting one costs more than it gains.
_THREADED_BYTES = 16 << 20


def fingerprint(data: bytes | memoryview) -> bytes:
    """xxh3-128 of header, metadata or table: 16 bytes, most significant first."""
    return xxh3_128_digest(data)


def digest(data: bytes | memoryview) -> int:
    """xxh3-64 of a chunk or a small storage."""
    return xxh3_64_intdigest(data)


def pack_digests(digests: Sequence[int]) -> bytes:
    """Digests as little-endian u64, the form they have in the file."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(table: bytes, count: int) -> tuple[int, ...]:
    """The first ``count`` digests of a checksum table."""
    return struct.unpack_from(f"<{count}Q", table)


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


def storage_digest(data: memoryview, nbytes: int, offset: int, by_chunk: Sequence[int]) -> int:
    """The digest of one storage: of its bytes if small, of its chunks' digests if large."""
    if nbytes < LARGE_BYTES:
        return digest(data[offset : offset + nbytes])
    return digest(pack_digests(by_chunk))


def all_digests(data: memoryview, sizes: Sequence[int], placement: Placement) -> tuple[list[int], list[int]]:
    """Chunk digests and storage digests of a whole payload."""
    by_chunk = chunk_digests(data, list(chunks(placement.extents)))
    by_storage = [
        storage_digest(data, nbytes, offset, by_chunk[first : first + chunk_count(nbytes)])
        for nbytes, offset, first in zip(sizes, placement.offsets, placement.first_chunk, strict=True)
    ]
    return by_chunk, by_storage
