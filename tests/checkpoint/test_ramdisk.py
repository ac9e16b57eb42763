"""The RAM disk: who may come in, how much fits, who outlives whom, and what is left of the dead."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuslice.checkpoint import tree
from gpuslice.checkpoint.budget import Budget
from gpuslice.checkpoint.layout import Layout, StorageSpec
from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.slots import COMMIT, COMMIT_NEXT, OWNER
from gpuslice.checkpoint.snapshot import SnapshotFile, open_snapshot
from gpuslice.checkpoint.store import JobStore
from gpuslice.config import Settings
from gpuslice.errors import (
    CorruptSnapshotError,
    EnvironmentUnusableError,
    RamDiskFullError,
    RefusedSnapshotError,
    UsageError,
)

from .conftest import newest_of

MIB = 1 << 20
Save = Callable[..., SnapshotFile]
Actor = Callable[..., Any]


def layout(*sizes: int) -> Layout:
    return Layout(tuple(StorageSpec(sid, nbytes) for sid, nbytes in enumerate(sizes)))


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def leftovers(disk: RamDisk) -> list[str]:
    return sorted(name for name in os.listdir(disk.directory) if name != "lock")


# The directory


def test_the_directory_is_private(shm: Path) -> None:
    old = os.umask(0)
    try:
        disk = RamDisk(shm / "new")
        disk.open_store("a").close(keep=False)
    finally:
        os.umask(old)
    assert (shm / "new").stat().st_mode & 0o7777 == 0o700
    assert (shm / "new" / "lock").stat().st_mode & 0o7777 == 0o600


def test_links_other_kinds_and_open_modes_are_refused(shm: Path) -> None:
    real = shm / "real"
    real.mkdir(mode=0o700)
    (shm / "link").symlink_to(real)
    (shm / "file").touch()
    (shm / "open").mkdir(mode=0o755)
    (shm / "dangling").symlink_to(shm / "nothing")
    for name, problem in [
        ("link", "is a symbolic link"),
        ("dangling", "is a symbolic link"),
        ("file", "is not a directory"),
        ("open", "has mode 0755"),
        ("no/parent", "cannot make"),
    ]:
        with pytest.raises(EnvironmentUnusableError, match=problem):
            RamDisk(shm / name)
    assert os.listdir(real) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_a_foreign_directory_is_refused(shm: Path) -> None:
    (shm / "theirs").mkdir(mode=0o700)
    os.chown(shm / "theirs", 12345, -1)
    with pytest.raises(EnvironmentUnusableError, match="belongs to user 12345"):
        RamDisk(shm / "theirs")


@pytest.mark.parametrize("name", ["lock", "a.r0", "a.r0/owner", "a.r0/A.gsnp", "a.r0/snapshot.gen.next"])
def test_a_planted_link_is_never_written_through(shm: Path, name: str, save: Save) -> None:
    target = shm / "target"
    target.write_text("precious")
    planted = shm / "disk" / name
    planted.parent.mkdir(mode=0o700, parents=True)
    (shm / "disk").chmod(0o700)
    planted.symlink_to(target)
    refused = pytest.raises((EnvironmentUnusableError, RefusedSnapshotError))
    with refused, RamDisk(shm / "disk").open_store("a") as store:
        save(store)
    assert target.read_text() == "precious"


def test_settings_choose_directory_and_limit(shm: Path) -> None:
    disk = RamDisk.from_settings(Settings(ramdisk_dir=str(shm / "here"), ramdisk_limit="3MiB"))
    assert (disk.directory, disk.limit_bytes) == (shm / "here", 3 * MIB)
    status = os.statvfs(shm)
    assert RamDisk(shm / "here").limit_bytes == status.f_blocks * status.f_frsize // 2


@pytest.mark.parametrize("job", ["", "../up", "a/b", ".hidden", "_x", "a" * 65, "a\n"])
def test_a_name_cannot_lead_elsewhere(disk: RamDisk, job: str) -> None:
    for use in (disk.open_store, disk.boundaries):
        with pytest.raises(UsageError, match="not a job name"):
            use(job)
    assert leftovers(disk) == []


def test_impossible_stores_are_refused(disk: RamDisk) -> None:
    with pytest.raises(UsageError):
        disk.open_store("a", -1)
    with pytest.raises(UsageError):
        disk.open_store("a", slots=3)


# Snapshots of one store


def test_generations_grow_and_slots_alternate(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        paths = []
        for boundary in range(1, 6):
            snapshot = save(store, boundary=boundary)
            assert snapshot.generation == boundary
            assert newest_of(disk, "a") == snapshot.path
            paths.append(snapshot.path.name)
        assert paths == ["A.gsnp", "B.gsnp", "A.gsnp", "B.gsnp", "A.gsnp"]


def test_the_newest_restartable_snapshot_is_never_overwritten(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        precious = save(store, boundary=1, restartable=True)
        for boundary in range(2, 5):
            save(store, boundary=boundary, restartable=False)
            assert newest_of(disk, "a") == precious.path
        precious.verify()
        assert save(store, boundary=5, restartable=True).path != precious.path


@pytest.mark.parametrize("slots", [1, 2])
def test_a_slot_that_is_being_written_is_no_snapshot(disk: RamDisk, save: Save, slots: int) -> None:
    with disk.open_store("a", slots=slots) as store:
        paths = [save(store, boundary=boundary).path for boundary in (1, 2)]
        with store.begin(layout(MIB)):
            with pytest.raises(CorruptSnapshotError, match="missing or torn"):
                open_snapshot(paths[0])
            assert newest_of(disk, "a") == (paths[1] if slots == 2 else None)


def test_what_was_never_published_does_not_count(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        save(store, boundary=1)
        newest = save(store, boundary=2)
        commit = store.directory / COMMIT
        record = commit.read_bytes()
        commit.write_bytes(record[:-1] + b"!")
        assert newest_of(disk, "a") == newest.path
        commit.write_bytes(record[:100])
        assert newest_of(disk, "a") == newest.path
        commit.unlink()
        assert newest_of(disk, "a") is None


def test_a_damaged_snapshot_gives_way_to_the_one_before(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        before, newest = save(store, boundary=1), save(store, boundary=2)
        with newest.path.open("r+b") as file:
            file.seek(newest.record.tail + 5)
            file.write(b"!")
        assert newest_of(disk, "a") == before.path
        with newest.path.open("r+b") as file:
            file.truncate(100)
        assert newest_of(disk, "a") == before.path
        with before.path.open("r+b") as file:
            file.truncate(100)
        assert newest_of(disk, "a") is None


def test_an_arena_is_faulted_once_and_reused(disk: RamDisk, save: Save) -> None:
    with disk.open_store(None) as store:
        homes = [address(save(store, boundary=boundary).view(0)) for boundary in range(6)]
        assert homes[:2] * 3 == homes
        first, _, _ = (save(store, boundary=boundary) for boundary in (7, 8, 9))
        with pytest.raises(UsageError, match="closed or was overwritten"):
            first.view(0)


def test_a_store_of_one_slot_can_follow_one_of_two(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        save(store, boundary=1)
        save(store, boundary=2)
    with disk.open_store("a", slots=1) as store:
        assert list(store.restartable()) == [2]
        assert save(store, boundary=3).path.name == "A.gsnp"
        assert list(store.restartable()) == [2, 3]
        store.forget_after(2)
        assert list(store.restartable()) == [2]
        assert save(store, boundary=4).generation == 4


def test_a_job_that_nobody_can_restart_needs_one_arena(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        homes = {address(save(store, boundary=i, restartable=False).view(0)) for i in range(4)}
        assert len(homes) == 1
        assert not (store.directory / "B.gsnp").exists()


def test_a_device_that_refuses_a_mapping_gets_it_again(disk: RamDisk, save: Save) -> None:
    registered: list[int] = []

    def refuse(memory: memoryview) -> None:
        raise EnvironmentUnusableError("the page-lock limit is reached")

    def register(memory: memoryview) -> None:
        registered.append(address(memory))

    def unregister(memory: memoryview) -> None:
        registered.remove(address(memory))

    with disk.open_store("a", slots=1) as store:
        store.bind(refuse, unregister)
        for _ in range(2):
            with pytest.raises(EnvironmentUnusableError, match="page-lock"):
                save(store, boundary=1)
        store.bind(register, unregister)
        save(store, boundary=1).verify()
        assert len(registered) == 1
        with pytest.raises(EnvironmentUnusableError, match="page-lock"):
            store.bind(refuse, unregister)
        assert registered == []
        store.bind(register, unregister)
        save(store, boundary=2).verify()
        assert len(registered) == 1
    assert registered == []


def test_every_mapping_is_announced_once_and_withdrawn_before_it_goes(disk: RamDisk, save: Save) -> None:
    registered: dict[int, int] = {}

    def register(memory: memoryview) -> None:
        assert address(memory) not in registered
        registered[address(memory)] = len(memory)

    def unregister(memory: memoryview) -> None:
        assert len(memory) == registered.pop(address(memory))
        assert bytes(memory[:1]) in (b"\0", bytes([memory[0]]))

    other: list[memoryview] = []
    store = disk.open_store(None)
    save(store)
    store.bind(register, unregister)
    assert len(registered) == 1
    for _ in range(3):
        save(store)
    assert len(registered) == 2
    with store.begin(layout(40 * MIB)) as writer:
        assert len(registered) == 2
        assert registered[address(writer.arena)] == len(writer.arena) >= 40 * MIB
    store.bind(other.append, other.remove)
    assert registered == {}
    assert len(other) == 2
    store.close(keep=False)
    assert other == []


def test_views_survive_the_growth_of_their_arena(disk: RamDisk) -> None:
    with disk.open_store(None, slots=1) as store:
        writer = store.begin(layout(MIB))
        old = writer.view(0)
        old[:] = b"x" * MIB
        writer.abort()
        store.begin(layout(64 * MIB)).abort()
        assert bytes(old[-1:]) == b"x"


def test_two_slots_cost_little_more_than_twice_the_state(disk: RamDisk, save: Save) -> None:
    with disk.open_store(None) as store, disk.open_store(None, slots=1) as thrifty:
        for boundary in range(3):
            save(store, boundary=boundary, sizes=(60 * MIB,))
            save(thrifty, boundary=boundary, sizes=(60 * MIB,))
        used = {len(os.listdir(info.directory)): info.bytes for info in disk.listing()}
        assert used[4] <= 2.15 * 60 * MIB
        assert used[3] <= 1.08 * 60 * MIB


def test_many_cycles_leave_files_descriptors_and_mappings_level(disk: RamDisk, save: Save) -> None:
    def level() -> tuple[int, int, int]:
        mappings = Path("/proc/self/maps").read_text().count(str(disk.directory))
        return disk.used_bytes, len(os.listdir("/proc/self/fd")), mappings

    with disk.open_store("a") as store:
        save(store, sizes=(1000,))
        save(store, sizes=(1000,))
        before = level()
        for boundary in range(300):
            with open_snapshot(save(store, boundary=boundary, sizes=(1000,)).path) as snapshot:
                snapshot.verify()
        del snapshot
        assert level() == before


# Limits


def test_what_does_not_fit_is_refused_before_anything_is_written(shm: Path, save: Save) -> None:
    disk = RamDisk(shm / "disk", 16 * MIB)
    with disk.open_store("a") as store:
        first = save(store, boundary=1)
        store.begin(layout(MIB)).abort()
        used, files = disk.used_bytes, os.listdir(store.directory)
        with pytest.raises(RamDiskFullError, match=r"MiB more .* of 16\.00 MiB are used") as caught:
            store.begin(layout(18 * MIB))
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
        store.begin(layout(60 * MIB))
    other.kill()
    with disk.open_store(None) as store, pytest.raises(RamDiskFullError):
        store.begin(layout(60 * MIB))
    disk.collect(everything=True)
    with disk.open_store(None) as store:
        store.begin(layout(60 * MIB)).abort()


def test_a_file_system_without_room_is_noticed_before_it_bites(
    disk: RamDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.open_store("a") as store:
        real = os.statvfs(disk.directory)
        fields = list(real)
        fields[4] = 4 * MIB // real.f_frsize
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
        with pytest.raises(RamDiskFullError, match=r"4\.00 MiB of memory are free"):
            store.begin(layout(5 * MIB))
        assert sorted(os.listdir(store.directory)) == [OWNER, COMMIT_NEXT]


def test_what_is_promised_to_others_is_not_free(disk: RamDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    promised = disk.directory / "other.r0" / "A.gsnp"
    promised.parent.mkdir(mode=0o700)
    promised.touch()
    os.truncate(promised, 30 * MIB)
    assert disk.used_bytes == 30 * MIB
    real = os.statvfs(disk.directory)
    fields = list(real)
    fields[4] = 32 * MIB // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with disk.open_store("a") as store:
        store.begin(layout(MIB)).abort()
        with pytest.raises(RamDiskFullError, match=r"2\.00 MiB of memory are free"):
            store.begin(layout(10 * MIB))


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
                store.begin(layout(5 * MIB))
            assert sorted(os.listdir(store.directory)) == [OWNER, COMMIT_NEXT]
        save(store, boundary=1)
        save(store, boundary=2)
        lengths = [path.stat().st_size for path in sorted(store.directory.glob("*.gsnp"))]
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(RamDiskFullError):
                store.begin(layout(50 * MIB))
        assert [path.stat().st_size for path in sorted(store.directory.glob("*.gsnp"))] == lengths
        assert [open_snapshot(store.directory / name).generation for name in ("A.gsnp", "B.gsnp")] == [1, 2]


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB, where this process may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "gpuslice-test", str(tmp_path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True, timeout=30)


def test_a_full_tmpfs_is_an_error_and_not_a_bus_error(
    small_tmpfs: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RamDisk(small_tmpfs / "disk", 256 * MIB)
    with disk.open_store("a", slots=1) as store:
        with pytest.raises(RamDiskFullError, match="of memory are free"):
            store.begin(layout(9 * MIB))
        with monkeypatch.context() as patch:
            patch.setattr(Budget, "free_bytes", lambda self: 1 << 40)
            with pytest.raises(RamDiskFullError):
                store.begin(layout(9 * MIB))
        assert sorted(os.listdir(store.directory)) == [OWNER, COMMIT_NEXT]
        save(store, sizes=(5 * MIB,)).verify()


def test_an_interrupted_reservation_is_no_trap(
    disk: RamDisk, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    def interrupted(descriptor: int, offset: int, length: int) -> None:
        real(descriptor, offset, min(length, 4096))
        if length > 4096:
            raise KeyboardInterrupt

    with disk.open_store("a", slots=1) as store:
        save(store, sizes=(MIB,))
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.begin(layout(20 * MIB))
        save(store, sizes=(20 * MIB,)).verify()
        allocated = (store.directory / "A.gsnp").stat()
        assert allocated.st_blocks * 512 >= allocated.st_size


def test_an_unusable_file_system_is_no_full_one(disk: RamDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with disk.open_store("a") as store, pytest.raises(EnvironmentUnusableError, match="not supported"):
        store.begin(layout(MIB))


def test_enospc_in_publish_keeps_the_previous_snapshot(
    disk: RamDisk, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with disk.open_store("a") as store:
        save(store, boundary=1)
        with store.begin(layout(MIB)) as writer:
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", full)
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
                store.begin(layout(9 * MIB)).abort()
                results.append(True)
            except RamDiskFullError:
                results.append(False)

        threads = [threading.Thread(target=attempt, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
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


# The living and the dead


def test_two_living_processes_cannot_be_the_same_rank(disk: RamDisk, actor: Actor, save: Save) -> None:
    other = actor()
    assert other.ask("open", job="a", rank=1)[0] == "ok"
    with pytest.raises(UsageError, match=rf"job a rank 1 is running already, in process {other.process.pid}"):
        disk.open_store("a", 1)
    mine = disk.open_store("a", 0)
    assert other.ask("open", job="a", rank=0)[0] == "UsageError"
    with pytest.raises(UsageError, match="running already"):
        disk.open_store("a", 0)
    save(mine)
    other.kill()
    disk.open_store("a", 1).close(keep=True)
    mine.close(keep=False)
    assert leftovers(disk) == []


def test_the_snapshot_of_a_killed_named_job_is_found(disk: RamDisk, actor: Actor) -> None:
    other = actor()
    other.ask("open", job="night", rank=3)
    for boundary in (1, 2, 3):
        other.ask("save", boundary=boundary)
    other.kill()
    path = newest_of(disk, "night", 3)
    assert path is not None
    with open_snapshot(path) as snapshot:
        snapshot.verify()
        assert snapshot.boundary == 3
    assert newest_of(disk, "night", 0) is None
    assert newest_of(disk, "day") is None


def test_a_successor_takes_over_and_keeps_the_old_snapshot_until_it_has_its_own(
    disk: RamDisk, actor: Actor, save: Save
) -> None:
    other = actor()
    other.ask("open", job="a")
    other.ask("save", boundary=1)
    other.ask("save", boundary=2)
    other.kill()
    with disk.open_store("a") as store:
        old = newest_of(disk, "a")
        assert old is not None
        writer = store.begin(layout(2 * MIB))
        assert newest_of(disk, "a") == old
        with open_snapshot(old) as snapshot:
            snapshot.verify()
            assert snapshot.boundary == 2
        new = writer.publish(tree.encode(None), [], boundary=3, restartable=True)
        assert (new.generation, newest_of(disk, "a")) == (3, new.path)
        assert new.path != old
        assert save(store, boundary=4).path == old


def test_a_store_that_is_closed_keeps_one_snapshot_or_nothing(disk: RamDisk, save: Save) -> None:
    for keep, restartable, job, left in [
        (True, True, "kept", ["A.gsnp", OWNER, COMMIT]),
        (True, False, "useless", None),
        (False, True, "dropped", None),
        (True, False, None, ["A.gsnp", OWNER, COMMIT]),
        (False, True, None, None),
    ]:
        store = disk.open_store(job)
        for boundary in (1, 2, 3):
            save(store, boundary=boundary, restartable=restartable)
        directory = store.directory
        store.close(keep=keep)
        store.close(keep=keep)
        assert store.closed
        assert (sorted(os.listdir(directory)) if directory.exists() else None) == left
        with pytest.raises(UsageError, match="closed"):
            store.begin(layout(1))
    disk.collect()
    assert leftovers(disk) == ["kept.r0"]
    assert disk.collect() == []
    assert [info.job for info in disk.collect(everything=True)] == ["kept"]


def test_collect_takes_the_dead_and_spares_the_living(disk: RamDisk, actor: Actor, save: Save) -> None:
    dead, unnamed, living = actor(), actor(), actor()
    dead.ask("open", job="named")
    unnamed.ask("open", job=None)
    living.ask("open", job="living")
    for process in (dead, unnamed, living):
        process.ask("save", boundary=1)
        process.ask("save", boundary=2)
    useless = actor()
    useless.ask("open", job="useless")
    useless.ask("save", boundary=1, restartable=False)
    mine = disk.open_store(None)
    save(mine)
    for process in (dead, unnamed, useless):
        process.kill()
    used = disk.used_bytes
    assert sorted(str(info.job) for info in disk.collect()) == ["None", "useless"]
    assert disk.used_bytes < used
    assert [info.job for info in disk.listing() if not info.alive] == ["named"]
    newest = newest_of(disk, "named")
    assert newest is not None
    assert open_snapshot(newest).boundary == 2
    assert disk.collect() == []
    assert [info.job for info in disk.collect(everything=True)] == ["named"]
    assert living.ask("save", boundary=3) == ("ok", 3)
    assert save(mine).generation == 2
    mine.close(keep=False)
    assert leftovers(disk) == ["living.r0"]


def test_a_forked_worker_does_not_keep_its_dead_parent_alive(disk: RamDisk, actor: Actor) -> None:
    other = actor()
    other.ask("open", job="a")
    other.ask("save", boundary=1)
    worker = other.ask("fork")[1]
    other.kill()
    os.kill(worker, 0)
    deadline_s = time.monotonic() + 60
    while (info := disk.listing()[0]).alive and time.monotonic() < deadline_s:
        time.sleep(0.01)  # the worker lets go in its first moments, and nobody hears of that
    assert (info.alive, info.boundary) == (False, 1)
    disk.open_store("a").close(keep=False)
    assert leftovers(disk) == []


def test_a_store_is_no_use_in_a_forked_child(disk: RamDisk, actor: Actor) -> None:
    other = actor()
    other.ask("open", job="a")
    assert other.ask("begin_in_child") == ("ok", ["UsageError", "closed"])
    assert other.ask("save", boundary=1) == ("ok", 1)
    with pytest.raises(UsageError, match="running already"):
        disk.open_store("a")


def test_collecting_races_with_processes_that_come_and_go(disk: RamDisk, actor: Actor) -> None:
    comer, collector = actor(), actor()
    for boundary in range(20):
        comer.tell("open", job="a")
        comer.tell("save", boundary=boundary, nbytes=1000)
        comer.tell("close", keep=bool(boundary % 2))
        collector.tell("collect", everything=True)
    for _ in range(20):
        assert comer.answer()[0] == "ok"
        assert comer.answer()[0] == "ok"
        assert comer.answer()[0] == "ok"
        assert collector.answer()[0] == "ok"
    disk.collect(everything=True)
    assert leftovers(disk) == []


def test_the_listing_tells_what_there_is(disk: RamDisk, save: Save) -> None:
    with disk.open_store("named", 2) as store, disk.open_store(None):
        save(store, boundary=17)
        newest = save(store, boundary=18, restartable=False)
        unnamed, named = sorted(disk.listing(), key=lambda info: info.job or "")
        assert (named.job, named.rank, named.pid, named.alive) == ("named", 2, os.getpid(), True)
        assert (named.generation, named.boundary, named.restartable) == (2, 18, False)
        assert named.snapshot == str(newest.path)
        assert (unnamed.job, unnamed.generation, unnamed.snapshot) == (None, None, None)
        assert named.bytes + unnamed.bytes == disk.used_bytes


# Crashes


@pytest.mark.parametrize(("saved", "slots"), [(0, 2), (1, 2), (2, 2), (1, 1)])
def test_a_crash_at_any_step_leaves_a_whole_snapshot_or_none(
    shm: Path, actor: Actor, saved: int, slots: int
) -> None:
    outcomes = set()
    process = actor()
    for step in range(1, 40):
        disk = RamDisk(shm / f"step{step}", 256 * MIB)
        _, survived = process.ask("crash", directory=str(disk.directory), slots=slots, saved=saved, step=step)
        outcomes.add(check_after_crash(disk, saved, slots, survived))
        if survived:
            break
    else:
        pytest.fail("the save never came to its end")
    assert outcomes == {saved, saved + 1} | ({0} if slots == 1 else set())


def test_a_crash_around_a_save_leaves_nothing_that_gc_does_not_find(
    shm: Path, actor: Actor, save: Save
) -> None:
    process = actor()
    for step in range(1, 60):
        disk = RamDisk(shm / f"step{step}", 256 * MIB)
        _, survived = process.ask("crash_around", directory=str(disk.directory), step=step)
        if step % 2:
            disk.collect()
        else:  # a successor takes over whatever there is
            with disk.open_store("a") as store:
                save(store, boundary=1)
            disk.collect(everything=True)
        assert (leftovers(disk), disk.used_bytes) == ([], 0)
        if survived:
            assert step > 10
            break
    else:
        pytest.fail("it never came to its end")


def check_after_crash(disk: RamDisk, saved: int, slots: int, survived: bool) -> int:
    """What the dead process left must be whole, usable by a successor, and collectable; its boundary."""
    path = newest_of(disk, "a")
    found = 0
    if path is not None:
        with open_snapshot(path) as snapshot:
            snapshot.verify()
            found = snapshot.boundary
            assert snapshot.view(0) == bytes([found]) * (3 * MIB)
            assert int.from_bytes(snapshot.view(1), "little") == found == tree.decode(snapshot.tree)
    allowed = {saved + 1} if survived else {saved, saved + 1} | ({0} if slots == 1 else set())
    assert found in allowed
    with disk.open_store("a") as store, store.begin(layout(4 * MIB)) as writer:
        assert newest_of(disk, "a") == path
        writer.publish(tree.encode(None), [], boundary=99, restartable=False)
    assert [info.boundary for info in disk.collect(everything=True)] == ([found] if found else [])
    assert leftovers(disk) == []
    assert disk.used_bytes == 0
    return found
