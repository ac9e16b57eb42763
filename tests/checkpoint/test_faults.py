"""A full file system at every single call that could meet it: an error of ours, and nothing is lost."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import RamDiskFullError, SnapshotError

from .conftest import MIB, newest_of

#: What takes room in a file system.
TAKING = ("mkdir", "open", "ftruncate", "posix_fallocate", "pwrite", "replace")


class Fault:
    """Makes the Nth call that takes room fail; a write gets half of its bytes out first.

    ``os.open`` takes room only where it may make a file.
    """

    def __init__(self, patch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.left = number
        self.code = code
        self.hit: str | None = None
        for name in TAKING:
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))
        patch.setattr(mmap, "mmap", self.wrap("mmap", mmap.mmap))

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return function(*arguments, **options)
            self.left -= 1
            if self.left == 0:
                self.hit = name
                if name == "pwrite":
                    descriptor, data, position = arguments
                    function(descriptor, bytes(data)[: len(data) // 2], position)
                raise OSError(self.code, os.strerror(self.code))
            return function(*arguments, **options)

        return faulty


def write(store: JobStore, boundary: int, nbytes: int, *, restartable: bool = True) -> SnapshotFile:
    """As a suspend does it: what was not published is aborted."""
    with store.begin(Layout((StorageSpec(nbytes),))) as writer:
        writer.view(0)[:] = bytes([boundary]) * nbytes
        return writer.publish(tree.encode(boundary), [], boundary=boundary, restartable=restartable)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_a_save_meets_a_full_disk_at_any_call(
    disk: RamDisk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    hits = []
    for number in range(1, 60):
        name = f"a{number}"
        with disk.open_store(name) as store:
            write(store, 1, MIB)
            before, used, open_files = newest_of(disk, name), disk.used_bytes, descriptors()
            # Larger than the last one: the arena has to grow.
            with monkeypatch.context() as patch:
                fault = Fault(patch, number, code)
                try:
                    write(store, 2, 5 * MIB, restartable=number % 2 == 0)
                except RamDiskFullError:
                    assert fault.hit is not None
                else:
                    assert fault.hit is None
                    break
            hits.append(fault.hit)
            assert newest_of(disk, name) == before
            assert before is not None
            with open_snapshot(before) as snapshot:
                snapshot.verify()
            assert disk.used_bytes <= used + 9 * MIB
            assert descriptors() <= open_files + 1
            # With room again it goes on as if nothing had been.
            assert write(store, 3, MIB).boundary == 3
    else:
        pytest.fail("the save never came to its end")
    assert {"open", "ftruncate", "posix_fallocate", "pwrite", "mmap"} <= set(hits)


@pytest.mark.slow
def test_coming_back_from_the_spill_directory_meets_a_full_disk_at_any_call(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = []
    for number in range(1, 60):
        place = shm / f"spill{number}"
        disk = RamDisk(shm / f"disk{number}", 64 * MIB, spill_directory=place)
        with disk.open_store("a") as store:
            write(store, 7, 5 * MIB)
        disk.spill()
        open_files = descriptors()
        with monkeypatch.context() as patch:
            fault = Fault(patch, number, errno.ENOSPC)
            try:
                disk.open_store("a").abandon()
            except (RamDiskFullError, SnapshotError):  # the latter if it cannot be mapped
                hits.append(fault.hit)
        assert descriptors() == open_files
        assert disk.boundaries("a") == {7}
        with disk.open_store("a") as store:
            assert list(store.restartable()) == [7]
            with store.restartable()[7] as snapshot:
                snapshot.verify()
                assert set(snapshot.view(0)) == {7}
        if len(hits) < number:
            break
    else:
        pytest.fail("it never came back")
    assert {"mkdir", "open", "ftruncate"} <= set(hits)  # the snapshot itself is read where it lies


def test_opening_a_store_meets_a_full_disk_at_any_call(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = []
    for number in range(1, 30):
        directory = shm / f"disk{number}"
        open_files = descriptors()
        with monkeypatch.context() as patch:
            fault = Fault(patch, number, errno.ENOSPC)
            store: JobStore | None = None
            try:
                store = RamDisk(directory, 64 * MIB).open_store("a")
            except RamDiskFullError:
                hits.append(fault.hit)
        if store is not None:
            store.close(keep=False)
            break
        assert descriptors() == open_files
        disk = RamDisk(directory, 64 * MIB)
        disk.collect(everything=True)
        assert disk.listing() == []
        with disk.open_store("a") as again:
            write(again, 1, MIB)
    else:
        pytest.fail("it never opened")
    assert {"mkdir", "open", "pwrite"} <= set(hits)
