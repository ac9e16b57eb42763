"""The room of parked jobs while disks fail, processes die and others look on: every snapshot stays whole."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.files import short_path
from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.ramdisk.listing import Place
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import SOCKET, RoomListener, request_room
from gpuslice.checkpoint.ramdisk.spill import Pause, Spilled
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import RamDiskFullError

from ....patience import PATIENCE_S
from ...conftest import MIB
from .parked import NBYTES, Actor, Save, files, found, holds, leaves_nothing


@pytest.mark.parametrize("call", ["open", "posix_fallocate", "pwrite", "fdatasync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_spill_directory_that_fails_costs_a_parked_job_nothing(
    disk: RamDisk,
    store: JobStore,
    place: Path,
    save: Save,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    snapshot, real = save(store, boundary=1), getattr(os, call)

    def fails(*arguments: Any, **options: Any) -> Any:
        named = arguments[0] if call in ("open", "replace") else os.readlink(f"/proc/self/fd/{arguments[0]}")
        if str(named).endswith(".part"):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    with disk.open_store("other") as other, store.offering(snapshot), monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(RamDiskFullError, match=str(place)) as caught:
            other.begin(Layout((StorageSpec(60 * MIB),)))
        assert "a.r0" in caught.value.message
    assert files(place) == []
    assert holds(snapshot, 1)
    store.bring_back(snapshot)
    assert [info.place for info in disk.listing()] == [Place.RAM]


def test_an_error_of_the_system_is_an_answer_and_others_may_ask_afterwards(tmp_path: Path) -> None:
    failures = [FileNotFoundError(errno.ENOENT, "No such file or directory")]

    def give(pause: Pause) -> bool:
        pause()
        if failures:
            raise failures.pop()
        return True

    with RoomListener(tmp_path / SOCKET, give):
        with pytest.raises(RamDiskFullError, match=r"could make none: .*No such file"):
            request_room(tmp_path)
        assert request_room(tmp_path)


def test_who_asked_hears_the_end_though_a_child_has_inherited_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = socket.socket.accept
    inherited: list[socket.socket] = []

    def accepted(listener: socket.socket) -> Any:
        connection, address = accept(listener)
        inherited.append(connection.dup())
        return connection, address

    monkeypatch.setattr(socket.socket, "accept", accepted)
    with RoomListener(tmp_path / SOCKET, lambda pause: True), socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(PATIENCE_S)
        with short_path(tmp_path / SOCKET) as address:
            asker.connect(address)
        assert [asker.recv(9), asker.recv(9), asker.recv(9)][-1] == b""
    inherited[0].close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_during_a_move_has_no_part_in_it(tmp_path: Path) -> None:
    counts: list[int] = []

    def sockets() -> int:
        return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())

    def give(pause: Pause) -> bool:
        before, child = sockets(), os.fork()
        if child == 0:
            os._exit(sockets())
        counts[:] = before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return True

    with RoomListener(tmp_path / SOCKET, give):
        assert request_room(tmp_path)
    before, inherited = counts
    assert inherited == before - 2  # the listener, and what it has accepted


def test_a_listener_survives_the_lack_of_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def fails(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails)
    with RoomListener(tmp_path / SOCKET, lambda pause: True):
        assert request_room(tmp_path)


@pytest.mark.usefixtures("no_more_threads")
def test_without_more_threads_nobody_listens_and_the_job_parks_all_the_same(
    disk: RamDisk, store: JobStore, save: Save
) -> None:
    snapshot = save(store, boundary=1)
    before = len(os.listdir("/proc/self/fd"))
    with store.offering(snapshot):
        assert not request_room(store.directory)
        assert sorted(os.listdir(store.directory)) == ["A.gsnp", "owner"]
    assert len(os.listdir("/proc/self/fd")) == before
    store.bring_back(snapshot)
    assert holds(snapshot, 1)


def test_a_snapshot_that_is_just_removed_is_no_error(
    disk: RamDisk, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever counts what is spilled has no lock of those that come back."""
    assert disk.spilled is not None
    gone = Spilled("a.r0", 0, place / "a.r0.A.gsnp")
    monkeypatch.setattr(disk.spilled, "entries", lambda store=None: [gone])
    assert disk.spilled.used_bytes() == 0
    assert [info.spilled_bytes for info in disk.listing()] == [0]


def test_the_listing_says_what_is_under_way(
    disk: RamDisk, store: JobStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Place | None] = []
    snapshot = save(store, boundary=1, sizes=(NBYTES,))

    def watch(name: str) -> None:
        real = getattr(os, name)

        def watched(*arguments: Any) -> Any:
            result = real(*arguments)
            seen.extend(info.place for info in disk.listing())
            return result

        monkeypatch.setattr(os, name, watched)

    watch("fdatasync")
    with store.offering(snapshot):
        assert request_room(store.directory)
    assert seen == [Place.SPILLING]
    assert [info.place for info in disk.listing()] == [Place.SPILLED]
    store.bring_back(snapshot)
    assert [info.place for info in disk.listing()] == [Place.SPILLED]


def test_a_job_that_comes_back_does_not_wait_for_the_move(
    disk: RamDisk, store: JobStore, place: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = save(store, boundary=1)
    begun, wanted_back = threading.Event(), threading.Event()
    allocate, shutdown = os.posix_fallocate, socket.socket.shutdown

    def slow(descriptor: int, offset: int, length: int) -> None:
        begun.set()
        wanted_back.wait(PATIENCE_S)
        allocate(descriptor, offset, length)

    def wake(listener: socket.socket, how: int) -> None:
        shutdown(listener, how)
        wanted_back.set()

    answers: list[bool] = []
    asker = threading.Thread(target=lambda: answers.append(request_room(store.directory)))
    with store.offering(snapshot):
        monkeypatch.setattr(os, "posix_fallocate", slow)
        monkeypatch.setattr(socket.socket, "shutdown", wake)
        asker.start()
        assert begun.wait(PATIENCE_S)
    asker.join(PATIENCE_S)
    assert answers == [False]
    assert files(place) == []
    store.bring_back(snapshot)
    assert holds(snapshot, 1)
    assert [info.place for info in disk.listing()] == [Place.RAM]


def test_nobody_waits_for_the_dead(disk: RamDisk, actor: Actor) -> None:
    parked = actor()
    parked.ask("open", job="a")
    parked.ask("save", boundary=1)
    parked.ask("park")
    parked.kill()
    directory = disk.directory / "a.r0"
    assert (directory / SOCKET).exists()
    assert not request_room(directory)
    with (
        disk.open_store("a") as store,  # a successor may park, too
        store.restartable()[1] as snapshot,
        store.offering(snapshot),
    ):
        pass
    disk.collect(everything=True)
    assert os.listdir(disk.directory) == ["lock"]


def test_gc_spares_the_parked_and_finds_what_a_killed_one_left(
    disk: RamDisk, actor: Actor, place: Path
) -> None:
    parked = actor()
    parked.ask("open", job="a")
    parked.ask("save", boundary=1)
    parked.ask("save", boundary=2, restartable=False)
    parked.ask("park")
    while request_room(disk.directory / "a.r0"):
        pass
    assert len(files(place)) == 2
    assert disk.collect(everything=True) == []
    assert parked.ask("come_back") == ("ok", [2, 2])
    assert (files(place), disk.boundaries("a")) == (["a.r0.A.gsnp"], {1})
    parked.ask("save", boundary=3, restartable=False)
    parked.ask("park")
    assert request_room(disk.directory / "a.r0")
    assert len(files(place)) == 2
    parked.kill()
    # Nobody can go on from the state that it was parked with; from the one before another process can.
    assert disk.collect() == []
    assert (files(place), disk.boundaries("a")) == (["a.r0.A.gsnp"], {1})
    assert [info.place for info in disk.collect(everything=True)] == [Place.SPILLED]
    assert (files(place), os.listdir(disk.directory)) == ([], ["lock"])


@pytest.mark.slow
def test_whatever_happens_at_any_step_every_snapshot_is_whole(shm: Path, actor: Actor) -> None:
    """A parked job dies in the first, second, ... step of moving out and back; then the power goes, too."""
    process, seen, left = actor(), set(), set()
    for step in range(1, 200):
        place, after = shm / f"spill{step}", shm / f"after{step}"  # where nothing waits for a disk
        disk = RamDisk(shm / f"step{step}", 64 * MIB, spill_directory=place)
        _, survived = process.ask("crash_parked", directory=str(disk.directory), spill=str(place), step=step)
        shutil.copytree(place, after)
        seen.add(tuple(info.place for info in disk.listing()))
        assert disk.boundaries("a") == {4, 5}
        assert found(disk) == [4, 5]
        # A power cut takes the RAM disk, and what was not yet on the medium.
        for unfinished in after.glob("*.part"):
            os.truncate(unfinished, unfinished.stat().st_size // 2)
        cut = RamDisk(shm / f"cut{step}", 64 * MIB, spill_directory=after)
        on_the_medium = sorted(cut.boundaries("a"))
        assert found(cut) == on_the_medium
        left.add(tuple(on_the_medium))
        leaves_nothing(disk, place)
        leaves_nothing(cut, after)
        if survived:
            break
    else:
        pytest.fail("it never came to its end")
    assert seen == {(Place.RAM,), (Place.SPILLED,)}
    assert left == {(), (4,), (4, 5)}


def test_nothing_leaves_the_ram_disk_before_it_is_on_the_medium(
    store: JobStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut takes the RAM disk; then what counts in the spill directory is whole."""
    done: list[tuple[str, str]] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            where = arguments[0]
            if isinstance(where, int):
                where = os.readlink(f"/proc/self/fd/{where}")
            result = real(*arguments, **options)
            done.append((name, Path(where).name))
            return result

        monkeypatch.setattr(os, name, noted)

    snapshot = save(store, boundary=1)
    for name in ("pwrite", "fdatasync", "replace", "fsync", "unlink"):
        note(name)
    with store.offering(snapshot):
        assert request_room(store.directory)
    steps = [step for step in dict.fromkeys(done) if step[1] != SOCKET]
    assert steps == [
        ("pwrite", "a.r0.A.gsnp.part"),
        ("fdatasync", "a.r0.A.gsnp.part"),
        ("replace", "a.r0.A.gsnp.part"),
        ("fsync", "spill"),
        ("unlink", "A.gsnp"),
    ]
