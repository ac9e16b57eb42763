"""The RAM disk: who may come in, who outlives whom, and what is left of the dead."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.locks import FileLock
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import OWNER
from gpuslice.config import Settings
from gpuslice.errors import (
    EnvironmentUnusableError,
    RefusedSnapshotError,
    UsageError,
)

from ..conftest import MIB, layout_of, leftovers, newest_of

Save = Callable[..., SnapshotFile]
Actor = Callable[..., Any]


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


@pytest.mark.parametrize("name", ["lock", "a.r0", "a.r0/owner", "a.r0/A.gsnp"])
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
        writer = store.begin(layout_of(2 * MIB))
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
        (True, True, "kept", ["A.gsnp", OWNER]),
        (True, False, "useless", None),
        (False, True, "dropped", None),
        (True, False, None, ["A.gsnp", OWNER]),
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
            store.begin(layout_of(1))
    disk.collect()
    assert leftovers(disk) == ["kept.r0"]
    assert disk.collect() == []
    assert [info.job for info in disk.collect(everything=True)] == ["kept"]


def test_collect_leaves_a_killed_gang_the_snapshot_that_all_of_its_ranks_have(
    disk: RamDisk, actor: Actor
) -> None:
    for rank, boundaries in enumerate([(2, 4), (2,)]):
        process = actor()
        process.ask("open", job="gang", rank=rank)
        for boundary in boundaries:
            process.ask("save", boundary=boundary)
        process.kill()
    assert disk.collect() == []
    assert disk.boundaries("gang", 0) & disk.boundaries("gang", 1) == {2}


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
    (info,) = disk.listing()
    assert (info.alive, info.boundary) == (False, 1)
    disk.open_store("a").close(keep=False)
    assert leftovers(disk) == []


def test_a_lock_that_was_let_go_is_free_whoever_has_inherited_it(tmp_path: Path) -> None:
    """A thread may have opened the file, and not yet said that children are to close it, in a fork."""
    lock = FileLock.wait(tmp_path / "lock")
    inherited = os.dup(lock.descriptor)
    lock.release()
    free = FileLock.attempt(tmp_path / "lock")
    os.close(inherited)
    assert free is not None
    free.release()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_take_a_lock_from_its_parent(tmp_path: Path) -> None:
    with FileLock.wait(tmp_path / "lock") as lock:
        child = os.fork()
        if child == 0:
            os._exit(int(lock.held))
        assert os.waitpid(child, 0)[1] == 0
        assert FileLock.attempt(tmp_path / "lock") is None


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
