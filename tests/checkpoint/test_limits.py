"""How much fits into a RAM disk: limits, full file systems, and races for the last bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk.budget import Budget
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import OWNER
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import (
    EnvironmentUnusableError,
    RamDiskFullError,
)

from ..patience import PATIENCE_S
from .conftest import MIB, layout_of, leftovers, newest_of

Save = Callable[..., SnapshotFile]
Actor = Callable[..., Any]


def test_what_does_not_fit_is_refused_before_anything_is_written(shm: Path, save: Save) -> None:
    disk = RamDisk(shm / "disk", 16 * MIB)
    with disk.open_store("a") as store:
        first = save(store, boundary=1)
        store.begin(layout_of(MIB)).abort()
        used, files = disk.used_bytes, os.listdir(store.directory)
        with pytest.raises(RamDiskFullError, match=r"MiB more .* of 16\.00 MiB are used") as caught:
            store.begin(layout_of(18 * MIB))
        assert caught.value.exit_code == 5
        assert "ramdisk gc" in caught.value.remedy
        assert (disk.used_bytes, os.listdir(store.directory)) == (used, files)
        first.verify()
        assert save(store, boundary=2, sizes=(MIB,)).generation == 2


def test_the_limit_counts_what_other_processes_hold(disk: RamDisk, actor: Actor) -> None:
    other = actor()
    assert other.ask("open", job="other") == ("ok", None)
    assert other.ask("save", boundary=1, nbytes=200 * MIB) == ("ok", 1)
    with disk.open_store(None) as store, pytest.raises(RamDiskFullError):
        store.begin(layout_of(60 * MIB))
    other.kill()
    with disk.open_store(None) as store, pytest.raises(RamDiskFullError):
        store.begin(layout_of(60 * MIB))
    disk.collect(everything=True)
    with disk.open_store(None) as store:
        store.begin(layout_of(60 * MIB)).abort()


def test_what_nobody_can_go_on_from_makes_room_for_who_needs_it(disk: RamDisk, actor: Actor) -> None:
    other = actor()
    assert other.ask("open", job="other") == ("ok", None)
    assert other.ask("save", boundary=1, nbytes=200 * MIB, restartable=False) == ("ok", 1)
    with disk.open_store(None) as store:
        with pytest.raises(RamDiskFullError):
            store.begin(layout_of(60 * MIB))
        other.kill()
        store.begin(layout_of(60 * MIB)).abort()
    assert leftovers(disk) == []


@pytest.mark.parametrize(("scheduler", "left"), [("/s", 0), ("/t", 1)])
def test_a_scheduler_removes_what_its_own_dead_jobs_left(
    disk: RamDisk, actor: Actor, scheduler: str, left: int
) -> None:
    other = actor()
    assert other.ask("serve", scheduler="/s") == ("ok", None)
    assert other.ask("open", job="other") == ("ok", None)
    assert other.ask("save", boundary=1, nbytes=MIB, restartable=False) == ("ok", 1)
    disk.discard(scheduler)
    assert len(disk.listing()) == 1, "it lives"
    other.kill()
    disk.discard(scheduler)
    assert len(disk.listing()) == left


def test_a_file_system_without_room_is_noticed_before_it_bites(
    disk: RamDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.open_store("a") as store:
        real = os.statvfs(disk.directory)
        fields = list(real)
        fields[4] = 4 * MIB // real.f_frsize
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
        with pytest.raises(RamDiskFullError, match=r"4\.00 MiB of memory are free"):
            store.begin(layout_of(5 * MIB))
        assert os.listdir(store.directory) == [OWNER]


def test_what_is_promised_to_others_is_not_free(disk: RamDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    other = disk.open_store("other")
    used = disk.used_bytes
    promised = other.directory / "A.gsnp"
    promised.touch()
    os.truncate(promised, 30 * MIB)
    assert disk.used_bytes == used + 30 * MIB
    real = os.statvfs(disk.directory)
    fields = list(real)
    fields[4] = 32 * MIB // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with other, disk.open_store("a") as store:
        store.begin(layout_of(MIB)).abort()
        with pytest.raises(RamDiskFullError, match=r"2\.00 MiB of memory are free"):
            store.begin(layout_of(10 * MIB))


def test_enospc_while_reserving_leaves_nothing_behind(
    disk: RamDisk, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if length > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, offset, length)

    with disk.open_store("a") as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(RamDiskFullError):
                store.begin(layout_of(5 * MIB))
            assert os.listdir(store.directory) == [OWNER]
        save(store, boundary=1)
        save(store, boundary=2)
        lengths = [path.stat().st_size for path in sorted(store.directory.glob("*.gsnp"))]
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(RamDiskFullError):
                store.begin(layout_of(50 * MIB))
        assert [path.stat().st_size for path in sorted(store.directory.glob("*.gsnp"))] == lengths
        assert [open_snapshot(store.directory / name).generation for name in ("A.gsnp", "B.gsnp")] == [1, 2]


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB, where this process may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "gpuslice-test", str(tmp_path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True, timeout=PATIENCE_S)


def test_a_full_tmpfs_is_an_error_and_not_a_bus_error(
    small_tmpfs: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RamDisk(small_tmpfs / "disk", 256 * MIB)
    with disk.open_store("a") as store:
        with pytest.raises(RamDiskFullError, match="of memory are free"):
            store.begin(layout_of(9 * MIB))
        with monkeypatch.context() as patch:
            patch.setattr(Budget, "free_bytes", lambda self: 1 << 40)
            with pytest.raises(RamDiskFullError):
                store.begin(layout_of(9 * MIB))
        assert os.listdir(store.directory) == [OWNER]
        save(store, sizes=(5 * MIB,)).verify()


def test_an_interrupted_reservation_is_no_trap(
    disk: RamDisk, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    def interrupted(descriptor: int, offset: int, length: int) -> None:
        real(descriptor, offset, min(length, 4096))
        if length > 4096:
            raise KeyboardInterrupt

    with disk.open_store("a") as store:
        save(store, sizes=(MIB,), restartable=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.begin(layout_of(20 * MIB))
        save(store, sizes=(20 * MIB,), restartable=False).verify()
        allocated = (store.directory / "A.gsnp").stat()
        assert allocated.st_blocks * 512 >= allocated.st_size


def test_an_unusable_file_system_is_no_full_one(disk: RamDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with disk.open_store("a") as store, pytest.raises(EnvironmentUnusableError, match="not supported"):
        store.begin(layout_of(MIB))


def test_enospc_in_publish_keeps_the_previous_snapshot(
    disk: RamDisk, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a file system that copies what is written over."""
    real = os.pwrite

    def full(descriptor: int, data: bytes, position: int) -> int:
        if position == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, position)

    with disk.open_store("a") as store:
        save(store, boundary=1)
        with store.begin(layout_of(MIB)) as writer:
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", full)
                with pytest.raises(RamDiskFullError):
                    writer.publish(tree.encode(None), [], boundary=2, restartable=True)
            newest = newest_of(disk, "a")
            assert newest is not None
            assert open_snapshot(newest).boundary == 1
            assert writer.publish(tree.encode(None), [], boundary=2, restartable=True).generation == 2


def test_of_two_threads_that_race_for_the_last_bytes_one_wins(shm: Path) -> None:
    disk = RamDisk(shm / "disk", 16 * MIB)
    for _ in range(25):
        stores = [disk.open_store(None) for _ in range(2)]
        start = threading.Barrier(2)
        results: list[bool] = []

        def attempt(store: JobStore, start: threading.Barrier = start, results: list[bool] = results) -> None:
            start.wait()
            try:
                store.begin(layout_of(9 * MIB)).abort()
                results.append(True)
            except RamDiskFullError:
                results.append(False)

        threads = [threading.Thread(target=attempt, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(results) == [False, True]
        for store in stores:
            store.close(keep=False)
    assert leftovers(disk) == []


def test_of_two_processes_that_race_for_the_last_bytes_one_wins(disk: RamDisk, actor: Actor) -> None:
    racers = [actor(), actor()]
    for _ in range(5):
        for racer in racers:
            assert racer.ask("open", job=None)[0] == "ok"
        for racer in racers:
            racer.tell("begin", nbytes=140 * MIB)
        assert sorted(racer.answer()[0] for racer in racers) == ["RamDiskFullError", "ok"]
        for racer in racers:
            assert racer.ask("close", keep=False)[0] == "ok"
