"""Cold snapshots move to a slower place and come back, whole at every moment."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.locks import FileLock
from gpuslice.checkpoint.ramdisk.listing import Place
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import OWNER, Owner, write_owner
from gpuslice.errors import CorruptSnapshotError, EnvironmentUnusableError, RamDiskFullError, UsageError

from ....patience import PATIENCE_S
from ...conftest import MIB, newest_of
from .parked import Actor, Save


def leave(disk: RamDisk, job: str = "a", *, boundary: int = 5, nbytes: int = 3 * MIB) -> None:
    """A dead job with a snapshot."""
    with disk.open_store(job) as store, store.begin(Layout((StorageSpec(nbytes),))) as writer:
        writer.view(0)[:] = bytes([boundary]) * nbytes
        writer.publish(tree.encode(boundary), [], boundary=boundary, restartable=True)


def check(disk: RamDisk, job: str = "a", *, boundary: int = 5, nbytes: int = 3 * MIB) -> None:
    """Start the job again: it has its snapshot, whole, and goes on."""
    with disk.open_store(job) as store:
        assert list(store.restartable()) == [boundary]
        with store.restartable()[boundary] as snapshot:
            snapshot.verify()
            assert snapshot.view(0) == bytes([boundary]) * nbytes
            generation = snapshot.generation
        with store.begin(Layout((StorageSpec(100),))) as writer:
            newer = writer.publish(tree.encode(None), [], boundary=boundary + 1, restartable=False)
            assert newer.generation == generation + 1


def where(disk: RamDisk, place: Path) -> list[str]:
    """In which of the two places job a has whole snapshots."""
    found = ["RAM"] if newest_of(disk, "a") is not None else []
    return [*found, "spilled"] if list(place.glob("*.gsnp")) else found


def test_what_would_go_beyond_the_limit_stays_where_it_is(shm: Path, place: Path) -> None:
    disk = RamDisk(shm / "disk", 64 * MIB, spill_directory=place, spill_limit_bytes=6 * MIB)
    leave(disk)
    leave(disk, "b")
    with pytest.raises(
        RamDiskFullError, match=r"is full: [\d.]+ MiB more would be needed, [\d.]+ MiB of 6.00 MiB are used"
    ):
        disk.spill()
    assert [path.suffix for path in place.glob("*.r0.*")] == [".gsnp"]
    check(disk)
    check(disk, "b")
    assert [info.spilled for info in disk.listing()] == [True, False]


def test_there_and_back(disk: RamDisk, place: Path) -> None:
    leave(disk)
    assert [info.job for info in disk.spill()] == ["a"]
    assert os.listdir(disk.directory) == ["lock"]
    assert disk.used_bytes == 0
    (info,) = disk.listing()
    assert (info.job, info.boundary, info.alive, info.place) == ("a", 5, False, Place.SPILLED)
    assert info.bytes == info.spilled_bytes == (place / "a.r0.A.gsnp").stat().st_size
    assert (place / "a.r0.A.gsnp").stat().st_mode & 0o777 == 0o600
    check(disk)  # read where it is, and stays there until the next one is whole
    assert [info.spilled for info in disk.listing()] == [True]
    leave(disk, boundary=6)
    assert [(info.boundary, info.spilled) for info in disk.listing()] == [(6, False)]
    assert not list(place.glob("*.gsnp*"))


def test_only_what_is_cold_and_named_is_moved(disk: RamDisk, place: Path) -> None:
    with disk.open_store("living") as store:
        with store.begin(Layout((StorageSpec(10),))) as writer:
            writer.publish(tree.encode(1), [], boundary=1, restartable=True)
        with disk.open_store(None) as unnamed, unnamed.begin(Layout((StorageSpec(10),))) as writer:
            writer.publish(tree.encode(1), [], boundary=1, restartable=True)
            assert disk.spill() == []
        assert list(store.restartable()) == [1]
    assert [info.job for info in disk.spill()] == ["living"]
    assert [path.name for path in place.glob("*.gsnp")] == ["living.r0.A.gsnp"]


def test_a_job_that_needs_room_gets_it_from_cold_snapshots(disk: RamDisk) -> None:
    leave(disk, "cold", nbytes=40 * MIB)
    leave(disk, "warm", boundary=6, nbytes=40 * MIB)
    assert [(info.job, info.spilled) for info in disk.listing()] == [("cold", True), ("warm", False)]
    check(disk, "cold", nbytes=40 * MIB)
    assert [(info.job, info.spilled) for info in disk.listing()] == [("cold", True), ("warm", False)]


def test_a_job_that_needs_room_gets_what_was_half_written_beside_a_spilled_snapshot(disk: RamDisk) -> None:
    leave(disk)
    disk.spill()
    killed = disk.open_store("a")
    killed.begin(Layout((StorageSpec(40 * MIB),)))
    killed.abandon()
    leave(disk, "other", nbytes=40 * MIB)
    check(disk)


def test_a_job_goes_on_where_the_ram_disk_has_no_room_for_what_it_had(
    disk: RamDisk, shm: Path, place: Path
) -> None:
    leave(disk, nbytes=40 * MIB)
    disk.spill()
    check(RamDisk(shm / "small", 20 * MIB, spill_directory=place), nbytes=40 * MIB)


@pytest.mark.parametrize("call", ["open", "posix_fallocate", "pwrite", "fdatasync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_spill_directory_that_fails_costs_nothing(
    disk: RamDisk, place: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    leave(disk)
    used, real = disk.used_bytes, getattr(os, call)

    def fails(*arguments: Any, **options: Any) -> Any:
        named = arguments[0] if call in ("open", "replace") else os.readlink(f"/proc/self/fd/{arguments[0]}")
        if str(named).endswith(".part"):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(RamDiskFullError if code == errno.ENOSPC else EnvironmentUnusableError) as caught:
            disk.spill()
    assert str(place) in caught.value.message
    assert "--spill-dir" in caught.value.remedy
    assert disk.used_bytes == used
    assert not list(place.glob("*.gsnp*"))
    check(disk)


def test_damage_where_it_was_spilled_is_found(disk: RamDisk, place: Path) -> None:
    leave(disk)
    disk.spill()
    path = place / "a.r0.A.gsnp"
    with path.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"\xff")
    with disk.open_store("a") as store, pytest.raises(CorruptSnapshotError, match="storage 0 is damaged"):
        store.restartable()
    assert [info.place for info in disk.listing()] == [Place.SPILLED]
    os.truncate(path, 2 * MIB)
    with pytest.raises(CorruptSnapshotError, match="truncated"):
        disk.open_store("a")
    assert path.exists()
    assert [info.job for info in disk.collect(everything=True)] == ["a"]
    assert not path.exists()
    leave(disk, boundary=7)
    check(disk, boundary=7)


def test_a_damaged_snapshot_stays_and_does_not_keep_others_from_being_moved(
    disk: RamDisk, place: Path, save: Save
) -> None:
    with disk.open_store("a") as store:
        for boundary in (4, 5):
            newest = save(store, boundary=boundary, sizes=(10 * MIB,))
        store.abandon()
    with newest.path.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"\xff")
    leave(disk, "b", nbytes=20 * MIB)
    leave(disk, "c", nbytes=40 * MIB)  # needs the room of both
    assert {path.name for path in place.glob("*.gsnp")} == {"a.r0.A.gsnp", "b.r0.A.gsnp"}
    assert [info.job for info in disk.spill()] == ["c"]
    assert {info.job: info.place for info in disk.listing()} == {
        "a": Place.RAM,
        "b": Place.SPILLED,
        "c": Place.SPILLED,
    }
    assert disk.boundaries("a") == {4, 5}
    with disk.open_store("a") as store:
        good, damaged = store.restartable().values()
        with good, damaged:
            good.verify()
            with pytest.raises(CorruptSnapshotError, match="storage 0"):
                damaged.verify()


def test_damage_in_the_ram_disk_makes_the_spilled_one_count(disk: RamDisk, place: Path) -> None:
    leave(disk)
    copy = bytearray((disk.directory / "a.r0" / "A.gsnp").read_bytes())
    disk.spill()
    assert copy == (place / "a.r0.A.gsnp").read_bytes()
    for damaged in (False, True):  # as after a crash between the two steps: both are there
        copy[2 * MIB] ^= damaged
        slot = disk.directory / "a.r0" / "A.gsnp"
        slot.parent.mkdir(mode=0o700)
        slot.write_bytes(copy)
        slot.chmod(0o600)
        if damaged:
            check(disk)
        with disk.open_store("a"):
            assert [info.spilled for info in disk.listing()] == [damaged]
        assert len(list(place.glob("*.gsnp"))) == damaged
        if not damaged:
            disk.spill()


def test_there_must_be_a_place(shm: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no spill directory"):
        RamDisk(shm / "disk", 64 * MIB).spill()
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(EnvironmentUnusableError, match="mode 0755"):
        RamDisk(shm / "disk", 64 * MIB, spill_directory=tmp_path / "open")


def test_a_crash_at_any_step_leaves_it_whole_in_one_place(shm: Path, tmp_path: Path, actor: Actor) -> None:
    process = actor()
    places = set()
    for step in range(1, 60):
        place = tmp_path / f"spill{step}"
        disk = RamDisk(shm / f"step{step}", 64 * MIB, spill_directory=place)
        leave(disk)
        asked = {"directory": str(disk.directory), "spill": str(place), "step": step}
        _, survived = process.ask("crash_spilling", **asked)
        places.add(tuple(where(disk, place)))
        check(disk)
        assert len(where(disk, place)) == 1
        disk.collect(everything=True)
        assert [path.name for path in place.iterdir()] in (["lock"], [])
        assert os.listdir(disk.directory) == ["lock"]
        if survived:
            break
    else:
        pytest.fail("it never came to its end")
    assert places == {("RAM",), ("spilled",), ("RAM", "spilled")}


@pytest.mark.parametrize("end", ["gone", "zombie", "number used again"])
def test_a_job_that_starts_while_its_snapshot_is_moved_waits_for_it(
    disk: RamDisk, actor: Actor, end: str
) -> None:
    process = actor()
    process.ask("open", job="a")
    process.ask("save", boundary=5)
    if end == "zombie":
        process.process.kill()
        os.waitid(os.P_PID, process.process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.kill()
    mover = FileLock.attempt(disk.directory / "a.r0" / OWNER)
    assert mover is not None
    if end == "number used again":
        write_owner(mover.descriptor, Owner("a", 0, os.getpid(), 1.0))
    found: list[int] = []

    def start() -> None:
        with disk.open_store("a") as store:
            found.extend(store.restartable())

    starting = threading.Thread(target=start)
    starting.start()
    starting.join(0.2)  # long enough to be refused
    assert starting.is_alive()
    mover.release()
    starting.join(PATIENCE_S)
    assert found == [5]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "not there"])
def test_it_goes_past_the_page_cache_where_that_is_possible(
    disk: RamDisk, place: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    real, ways = os.open, list[tuple[str, bool]]()

    def opened(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        wanted = bool(flags & os.O_DIRECT)
        if str(path).startswith(str(place)) and (wanted or flags & os.O_CREAT):
            ways.append((Path(path).suffix, wanted))
        if wanted and not direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags & ~os.O_DIRECT, *arguments, **options)

    leave(disk)
    monkeypatch.setattr(os, "open", opened)
    disk.spill()
    with disk.open_store("a") as store, store.restartable()[5] as snapshot:
        snapshot.verify()
    asked = [(".part", True)] if direct else [(".part", True), (".part", False)]
    assert [way for way in ways if way[0] in (".part", ".gsnp")] == asked


def test_gc_removes_what_a_process_left_half_written_there(disk: RamDisk, place: Path) -> None:
    leave(disk)
    half = place / "gone.r0.B.gsnp.part"
    half.write_bytes(b"half")
    disk.collect()
    assert not half.exists()
    assert disk.boundaries("a") == {5}
