"""The room of a running job's slots goes to whoever needs it; no snapshot that counts is lost by that."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.listing import Place
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import SPARE, request_room
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import RamDiskFullError

from ....patience import PATIENCE_S
from ...conftest import MIB, layout_of
from ...harness import FaultyDevice, Job
from .parked import Actor, Save, files, found, holds, leaves_nothing, mapped


def test_first_goes_what_only_a_successor_needs_then_the_next_suspend_s_arena(
    disk: RamDisk, store: JobStore, place: Path, save: Save
) -> None:
    save(store, boundary=1)
    save(store, boundary=2)
    assert not request_room(store.directory, SPARE)
    store.spare()
    assert request_room(store.directory, SPARE)
    assert (files(store.directory), files(place)) == (["A.gsnp"], ["a.r0.B.gsnp"])
    assert mapped(disk) == 1
    assert request_room(store.directory, SPARE)
    assert (files(store.directory), files(place)) == ([], ["a.r0.A.gsnp", "a.r0.B.gsnp"])
    assert not request_room(store.directory, SPARE)
    assert disk.boundaries("a") == {1, 2}
    # The next one takes the place of the older; the other stays where it is until it is superseded, too.
    assert save(store, boundary=3).path.name == "A.gsnp"
    assert not (store.directory / SPARE).exists()
    assert (files(store.directory), files(place)) == (["A.gsnp"], ["a.r0.B.gsnp"])
    assert disk.boundaries("a") == {2, 3}
    save(store, boundary=4)
    assert (files(place), disk.boundaries("a")) == ([], {3, 4})
    store.abandon()
    assert found_all(disk) == [3, 4]


def test_what_nobody_could_go_on_from_is_dropped_and_not_moved(
    disk: RamDisk, store: JobStore, place: Path, save: Save
) -> None:
    save(store, boundary=1, restartable=False)
    store.spare()
    assert request_room(store.directory, SPARE)
    assert (files(store.directory), files(place), mapped(disk)) == ([], [], 0)
    assert not request_room(store.directory, SPARE)
    assert holds(save(store, boundary=2, restartable=False), 2)


def test_an_arena_that_is_being_made_ready_is_given_up(disk: RamDisk, store: JobStore, save: Save) -> None:
    save(store, boundary=1)
    assert store.warm_up(layout_of(9 * MIB)) is not None
    store.spare()
    while request_room(store.directory, SPARE):
        pass
    assert (files(store.directory), disk.boundaries("a")) == ([], {1})
    assert holds(save(store, boundary=2), 2)


def test_without_a_place_to_move_to_a_running_job_keeps_what_it_has(shm: Path, save: Save) -> None:
    with RamDisk(shm / "disk", 64 * MIB).open_store("a") as store:
        save(store, boundary=1)
        store.spare()
        assert not request_room(store.directory, SPARE)
        assert files(store.directory) == ["A.gsnp"]


def test_what_somebody_reads_stays(disk: RamDisk, place: Path, save: Save) -> None:
    with disk.open_store("a") as store:
        save(store, boundary=1)
    with disk.open_store("a") as store:
        reader = store.restartable()[1]
        store.spare()
        assert not request_room(store.directory, SPARE)
        assert holds(reader, 1)
        reader.close()
        assert request_room(store.directory, SPARE)
        assert files(place) == ["a.r0.A.gsnp"]


def test_parked_jobs_come_before_running_ones(disk: RamDisk, place: Path, actor: Actor, save: Save) -> None:
    running = actor()
    running.ask("open", job="running")
    for boundary in (1, 2):
        running.ask("save", boundary=boundary, nbytes=12 * MIB)
    running.ask("spare")
    with disk.open_store("parked") as parked, disk.open_store("mine") as mine:
        snapshot = save(parked, boundary=1, sizes=(12 * MIB,))
        with parked.offering(snapshot):
            save(mine, boundary=1, sizes=(28 * MIB,)).verify()
            assert files(place) == ["parked.r0.A.gsnp"]
            mine.close(keep=False)
            with disk.open_store("next") as following:
                save(following, boundary=1, sizes=(45 * MIB,)).verify()
        assert files(place) == ["parked.r0.A.gsnp", "running.r0.B.gsnp"]
        assert disk.boundaries("running") == {1, 2}
    # It never noticed.
    assert running.ask("save", boundary=3, nbytes=12 * MIB)[0] == "ok"
    assert disk.boundaries("running") == {2, 3}


def test_only_a_suspend_takes_the_room_of_those_that_run(disk: RamDisk, place: Path, save: Save) -> None:
    with disk.open_store("a") as running, disk.open_store("b") as other:
        save(running, boundary=1, sizes=(40 * MIB,))
        running.spare()
        with pytest.raises(RamDiskFullError):
            other.slots[0].arena.ensure(30 * MIB, ahead=True)
        assert files(place) == []
        save(other, boundary=1, sizes=(30 * MIB,)).verify()
        assert files(place) == ["a.r0.A.gsnp"]


def test_a_suspend_without_room_moves_its_own_older_snapshot(
    disk: RamDisk, store: JobStore, place: Path, save: Save
) -> None:
    for boundary in (1, 2, 3, 4):
        save(store, boundary=boundary, sizes=(40 * MIB,)).verify()
        assert disk.used_bytes <= disk.limit_bytes
        assert disk.boundaries("a") == {boundary - 1, boundary} - {0}
        assert len(files(place)) == (boundary > 1)
    store.abandon()
    disk = RamDisk(disk.directory, 256 * MIB, spill_directory=place)
    with disk.open_store("a") as successor:
        assert sorted(successor.restartable()) == [3, 4]


@pytest.mark.parametrize("call", ["open", "posix_fallocate", "pwrite", "fdatasync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("whose", ["own", "other's"])
def test_a_spill_directory_that_fails_costs_nothing(
    disk: RamDisk,
    store: JobStore,
    place: Path,
    save: Save,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    whose: str,
) -> None:
    save(store, boundary=1)
    real = getattr(os, call)

    def fails(*arguments: Any, **options: Any) -> Any:
        named = arguments[0] if call in ("open", "replace") else os.readlink(f"/proc/self/fd/{arguments[0]}")
        if str(named).endswith(".part"):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    with disk.open_store("other") as other, monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        store.spare()
        asking = store if whose == "own" else other
        with pytest.raises(Exception, match=str(place)) as caught:
            asking.begin(layout_of(60 * MIB))
        assert "GpusliceError" in [kind.__name__ for kind in type(caught.value).__mro__]
    assert files(place) == []
    assert [info.place for info in disk.listing()] == [Place.RAM]
    save(store, boundary=2)
    store.abandon()
    assert found_all(disk) == [1, 2]


def found_all(disk: RamDisk) -> list[int]:
    """The boundaries that a successor can go on from, every byte compared with what ``save`` wrote."""
    with disk.open_store("a") as store:
        for boundary, snapshot in store.restartable().items():
            with snapshot:
                assert holds(snapshot, boundary)
        return sorted(store.restartable())


def test_one_whose_move_fails_does_not_keep_others_from_giving(
    disk: RamDisk, place: Path, save: Save
) -> None:
    """What nobody can go on from need not be moved."""
    full = RamDisk(disk.directory, disk.limit_bytes, spill_directory=place, spill_limit_bytes=MIB)
    with full.open_store("a") as kept, full.open_store("b") as dropped, full.open_store("c") as asking:
        save(kept, boundary=1, sizes=(20 * MIB,))
        save(dropped, boundary=1, sizes=(20 * MIB,), restartable=False)
        dropped.spare()
        kept.spare()  # is asked first
        save(asking, boundary=1, sizes=(30 * MIB,)).verify()
        assert (files(kept.directory), files(dropped.directory), files(place)) == (["A.gsnp"], [], [])
        with pytest.raises(RamDiskFullError, match="spill"):
            save(dropped, boundary=2, sizes=(20 * MIB,))


@pytest.mark.parametrize("whose", ["a dead job's", "own"])
def test_what_cannot_be_moved_does_not_keep_others_from_giving(
    disk: RamDisk, place: Path, save: Save, whose: str
) -> None:
    full = RamDisk(disk.directory, disk.limit_bytes, spill_directory=place, spill_limit_bytes=MIB)
    with full.open_store("a") as dropped, full.open_store("b") as asking:
        save(dropped, boundary=1, sizes=(20 * MIB,), restartable=False)
        dropped.spare()
        if whose == "own":
            save(asking, boundary=1, sizes=(20 * MIB,))
        else:
            with full.open_store("dead") as dead:
                save(dead, boundary=1, sizes=(20 * MIB,))
        save(asking, boundary=2, sizes=(30 * MIB,)).verify()
        assert (files(dropped.directory), files(place)) == ([], [])
        assert full.boundaries("b" if whose == "own" else "dead") >= {1}


def test_a_slot_that_cannot_be_moved_does_not_keep_the_other_from_being_dropped(
    disk: RamDisk, place: Path, save: Save
) -> None:
    full = RamDisk(disk.directory, disk.limit_bytes, spill_directory=place, spill_limit_bytes=MIB)
    with full.open_store("a") as store:
        save(store, boundary=1)
        save(store, boundary=2, restartable=False)
        store.spare()
        assert request_room(store.directory, SPARE)
        assert (files(store.directory), files(place)) == (["A.gsnp"], [])
        with pytest.raises(RamDiskFullError, match="spill"):
            request_room(store.directory, SPARE)


@pytest.mark.parametrize("where", ["lock", "verify", "piece"])
def test_a_suspend_does_not_wait_for_the_move(
    disk: RamDisk, store: JobStore, place: Path, save: Save, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Wherever it is: it is called off there, and all is as it was."""
    from gpuslice.checkpoint.ramdisk import spill

    save(store, boundary=1)
    begun, wanted = threading.Event(), threading.Event()
    shutdown = socket.socket.shutdown

    def wake(listener: socket.socket, how: int) -> None:
        shutdown(listener, how)
        wanted.set()

    def held(function: Callable[..., Any]) -> Callable[..., Any]:
        def holding(*arguments: Any, **options: Any) -> Any:
            begun.set()
            assert wanted.wait(PATIENCE_S)
            return function(*arguments, **options)

        return holding

    monkeypatch.setattr(socket.socket, "shutdown", wake)
    lock = spill.FileLock.wait(place / "lock") if where == "lock" else None
    if where == "verify":
        monkeypatch.setattr(SnapshotFile, "verify", held(SnapshotFile.verify))
    elif where == "piece":
        monkeypatch.setattr(os, "posix_fallocate", held(os.posix_fallocate))
    else:
        monkeypatch.setattr(spill.SpillDirectory, "_lock", held(spill.SpillDirectory._lock))
    answers: list[bool] = []
    store.spare()
    asker = threading.Thread(target=lambda: answers.append(request_room(store.directory, SPARE)))
    asker.start()
    assert begun.wait(PATIENCE_S)
    store.cool()  # as a suspend does first of all
    monkeypatch.undo()
    asker.join(PATIENCE_S)
    if lock is not None:
        lock.release()
    assert (answers, files(place)) == ([False], [])
    assert holds(save(store, boundary=2), 2)
    assert disk.boundaries("a") == {1, 2}
    store.abandon()
    assert found_all(disk) == [1, 2]


def test_a_forked_child_neither_answers_nor_withdraws(disk: RamDisk, actor: Actor) -> None:
    running = actor()
    running.ask("open", job="a")
    running.ask("save", boundary=1)
    running.ask("spare")
    assert running.ask("begin_in_child") == ("ok", ["UsageError", "closed"])
    assert request_room(disk.directory / "a.r0", SPARE)
    running.ask("save", boundary=2)
    running.ask("spare")
    running.ask("fork")  # and its child lives on
    running.kill()
    with socket.socket(socket.AF_UNIX) as connection, pytest.raises(ConnectionRefusedError):
        connection.connect(str(disk.directory / "a.r0" / SPARE))
    assert not request_room(disk.directory / "a.r0", SPARE)


def test_a_training_whose_slots_are_taken_again_and_again_is_bit_for_bit_as_before(
    disk: RamDisk, store: JobStore, job: Job
) -> None:
    switch = Switch(FaultyDevice(), store)
    for boundary in range(1, 7):
        before = job.digest()
        restartable = boundary % 3 != 0
        named = {"model": job.model} if restartable else None
        record = switch.suspend(boundary=boundary, named=named, restartable=restartable)
        assert record.bytes_unchanged == 0  # of a slot that was taken nothing is remembered
        switch.resume()
        assert job.digest() == before
        job.step()
        store.spare()
        while request_room(store.directory, SPARE):
            pass
        assert mapped(disk) == 0
        assert boundary - (not restartable) in disk.boundaries("a")


@pytest.mark.slow
def test_whatever_happens_at_any_step_every_snapshot_is_whole(shm: Path, actor: Actor) -> None:
    """A running job dies in the first, second, ... step of giving its slots and of the next save."""
    process, seen, left = actor(), set(), set()
    for step in range(1, 200):
        place, after = shm / f"spill{step}", shm / f"after{step}"
        disk = RamDisk(shm / f"step{step}", 64 * MIB, spill_directory=place)
        _, survived = process.ask("crash_sparing", directory=str(disk.directory), spill=str(place), step=step)
        shutil.copytree(place, after)
        boundaries = disk.boundaries("a")
        seen.add(tuple(sorted(boundaries)))
        assert found(disk) == sorted(boundaries)
        cut = RamDisk(shm / f"cut{step}", 64 * MIB, spill_directory=after)
        left.add(tuple(found(cut)))  # of a power cut, which takes the RAM disk
        leaves_nothing(disk, place)
        leaves_nothing(cut, after)
        if survived:
            break
    else:
        pytest.fail("it never came to its end")
    # While the next one is written over the place of the older, only the newest is there.
    assert seen == {(4, 5), (5,), (5, 6)}
    assert left == {(), (5,), (4, 5)}


def test_what_a_script_knows_the_path_of_stays(
    disk: RamDisk, store: JobStore, place: Path, save: Save
) -> None:
    snapshot = save(store, boundary=1, sizes=(40 * MIB,))
    store.handed_out = True
    store.spare()
    assert not request_room(store.directory, SPARE)
    with pytest.raises(RamDiskFullError):
        save(store, boundary=2, sizes=(40 * MIB,))
    assert files(place) == []
    snapshot.verify()
