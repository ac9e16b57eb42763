"""Pages of files in memory, and mappings of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuslice.kernels.host.memory_files import map_file, remove
from gpuslice.kernels.host.process_memory import PAGE_BYTES

BLOCK = 2 << 20
_BLOCK_BYTES = 512


@pytest.fixture
def descriptor(shm: Path) -> Iterator[int]:
    opened = os.open(shm / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield opened
    os.close(opened)


def allocated_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * _BLOCK_BYTES


def test_what_is_mapped_is_the_file(descriptor: int) -> None:
    content = np.arange(5 * PAGE_BYTES, dtype=np.uint32).tobytes()
    os.pwrite(descriptor, content, 0)
    whole, part = map_file(descriptor, len(content)), map_file(descriptor, PAGE_BYTES)
    assert whole == content
    assert part == content[:PAGE_BYTES]
    assert whole.readonly
    writable = map_file(descriptor, len(content), writable=True)
    writable[7 * PAGE_BYTES : 7 * PAGE_BYTES + 3] = b"new"
    assert os.pread(descriptor, 3, 7 * PAGE_BYTES) == whole[7 * PAGE_BYTES : 7 * PAGE_BYTES + 3] == b"new"


def test_a_mapping_ends_with_its_last_view(descriptor: int) -> None:
    os.ftruncate(descriptor, BLOCK)

    def mapped() -> bool:
        inode = str(os.fstat(descriptor).st_ino)
        return any(inode in line.split() for line in Path("/proc/self/maps").read_text().splitlines())

    view = map_file(descriptor, BLOCK)[10:20]
    assert mapped()
    del view
    assert not mapped()


def test_removed_pages_are_gone(descriptor: int) -> None:
    os.posix_fallocate(descriptor, 0, 2 * BLOCK)
    memory: Any = map_file(descriptor, 2 * BLOCK, writable=True)
    memory[:4] = b"gone"
    remove(memory)
    assert allocated_bytes(descriptor) == 0
    assert bytes(memory[:4]) == bytes(4)


def test_what_cannot_be_mapped_is_an_error(shm: Path) -> None:
    opened = os.open(shm, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="mapping 4096 bytes failed"):
            map_file(opened, 4096)
    finally:
        os.close(opened)
