"""Pages of files in memory, and mappings of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuslice.kernels import filepages
from gpuslice.kernels.filepages import allocate, huge_pages_in, map_file, remove
from gpuslice.kernels.host import HUGE_PAGE_BYTES, PAGE_BYTES, view_address

BLOCK = HUGE_PAGE_BYTES
_BLOCK_BYTES = 512


@pytest.fixture
def descriptor(shm: Path) -> Iterator[int]:
    opened = os.open(shm / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield opened
    os.close(opened)


def allocated_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * _BLOCK_BYTES


def huge_bytes(memory: memoryview) -> int:
    """How much of a mapping is mapped by huge pages."""
    start, found = f"{view_address(memory):x}-", False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if line.startswith(start):
            found = True
        elif found and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("there is no such mapping")


def test_what_is_mapped_is_the_file(descriptor: int) -> None:
    content = np.arange(3 * BLOCK + 5 * PAGE_BYTES, dtype=np.uint32).tobytes()[: 3 * BLOCK + 5 * PAGE_BYTES]
    os.pwrite(descriptor, content, 0)
    whole, part = map_file(descriptor, len(content)), map_file(descriptor, BLOCK, start=3 * PAGE_BYTES)
    assert view_address(whole) % BLOCK == 0
    assert view_address(part) % BLOCK == 3 * PAGE_BYTES
    assert whole == content
    assert part == content[3 * PAGE_BYTES : 3 * PAGE_BYTES + BLOCK]
    assert whole.readonly
    writable = map_file(descriptor, len(content), writable=True)
    writable[7 * PAGE_BYTES : 7 * PAGE_BYTES + 3] = b"new"
    assert os.pread(descriptor, 3, 7 * PAGE_BYTES) == part[4 * PAGE_BYTES : 4 * PAGE_BYTES + 3] == b"new"


def test_a_mapping_ends_with_its_last_view(descriptor: int) -> None:
    os.ftruncate(descriptor, BLOCK)

    def mapped() -> bool:
        inode = str(os.fstat(descriptor).st_ino)
        return any(inode in line.split() for line in Path("/proc/self/maps").read_text().splitlines())

    view = map_file(descriptor, BLOCK)[10:20]
    assert mapped()
    del view
    assert not mapped()


@pytest.mark.parametrize("start", [0, PAGE_BYTES, BLOCK, BLOCK + 3 * PAGE_BYTES])
@pytest.mark.parametrize("nbytes", [PAGE_BYTES, BLOCK, 2 * BLOCK + PAGE_BYTES, 40 * BLOCK])
def test_all_pages_are_there_and_nothing_is_changed(descriptor: int, start: int, nbytes: int) -> None:
    words = np.arange((start + nbytes) // 8, dtype=np.uint64)
    os.pwrite(descriptor, words[: start // 8 + 64].tobytes(), 0)
    os.pwrite(descriptor, words[-64:].tobytes(), start + nbytes - 512)
    allocate(descriptor, start, nbytes)
    assert os.fstat(descriptor).st_size == start + nbytes
    assert allocated_bytes(descriptor) >= nbytes
    found = np.frombuffer(map_file(descriptor, start + nbytes), np.uint64)
    assert np.array_equal(found[: start // 8 + 64], words[: start // 8 + 64])
    assert np.array_equal(found[-64:], words[-64:])
    assert not found[start // 8 + 64 : -64].any()


def test_the_pages_are_huge_where_the_kernel_makes_them(descriptor: int, shm: Path) -> None:
    if not huge_pages_in(shm):
        pytest.skip("the kernel makes no huge pages of this file system")
    allocate(descriptor, 0, 5 * BLOCK)
    memory = map_file(descriptor, 5 * BLOCK, writable=True)
    memory[:] = bytes(len(memory))
    assert huge_bytes(memory) == 5 * BLOCK
    again = map_file(descriptor, 5 * BLOCK)
    assert not any(again)
    assert huge_bytes(again) == 5 * BLOCK


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_a_kernel_without_huge_pages_gives_small_ones(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked: list[int] = []

    def refuse(address: int, nbytes: int) -> int:
        asked.append(nbytes)
        return number

    monkeypatch.setattr(filepages, "collapse", refuse)
    allocate(descriptor, 0, 100 * BLOCK)
    assert allocated_bytes(descriptor) == 100 * BLOCK
    assert sum(asked) == (100 * BLOCK if number == errno.EAGAIN else BLOCK)


def test_no_room_is_said(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def limited(opened: int, start: int, nbytes: int) -> None:
        if start + nbytes > 4 * BLOCK:
            raise OSError(errno.ENOSPC, "full")
        real(opened, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    with pytest.raises(OSError, match="full"):
        allocate(descriptor, 0, 9 * BLOCK)


def test_removed_pages_are_gone(descriptor: int) -> None:
    allocate(descriptor, 0, 2 * BLOCK)
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


def test_a_directory_without_files_in_memory_has_no_huge_pages(shm: Path) -> None:
    assert not huge_pages_in(shm / "missing")
    assert os.listdir(shm) == []
