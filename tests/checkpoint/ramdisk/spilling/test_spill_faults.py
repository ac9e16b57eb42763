"""What cannot be moved to the spill directory costs no snapshot, and keeps nobody else from giving room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.ramdisk.listing import Place
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import RamDiskFullError

from ....patience import PATIENCE_S
from ...conftest import MIB, layout_of
from .parked import Save, files, holds


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
def test_a_spill_directory_that_fails_costs_nothing(
    disk: RamDisk,
    store: JobStore,
    place: Path,
    save: Save,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    save(store, boundary=1)
    real = getattr(os, call)

    def fails(*arguments: Any, **options: Any) -> Any:
        named = arguments[0] if call in ("open", "replace") else os.readlink(f"/proc/self/fd/{arguments[0]}")
        if str(named).endswith(".part"):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(Exception, match=str(place)) as caught:
            store.begin(layout_of(60 * MIB))
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


@contextmanager
def parked_with_an_arena(disk: RamDisk, job: str, save: Save) -> Iterator[JobStore]:
    """A parked job that has made an arena of 20 MiB ready, which need not be moved."""
    with disk.open_store(job) as store:
        snapshot = save(store, boundary=1, sizes=(100,))
        warming = store.warm_up(layout_of(20 * MIB))
        assert warming is not None
        warming.join(PATIENCE_S)
        with store.offering(snapshot):
            assert files(store.directory) == ["A.gsnp", "B.gsnp"]
            yield store


@pytest.fixture
def full(disk: RamDisk, place: Path) -> RamDisk:
    """The same RAM disk, whose spill directory takes nothing large."""
    return RamDisk(disk.directory, disk.limit_bytes, spill_directory=place, spill_limit_bytes=4 * MIB)


@pytest.mark.parametrize("whose", ["another parked job's", "a dead job's", "own"])
def test_what_cannot_be_moved_does_not_keep_others_from_giving(
    full: RamDisk, place: Path, save: Save, whose: str
) -> None:
    with ExitStack() as jobs:
        dropped = jobs.enter_context(parked_with_an_arena(full, "a", save))
        asking = jobs.enter_context(full.open_store("b"))
        if whose == "own":
            save(asking, boundary=1, sizes=(20 * MIB,))
        elif whose == "a dead job's":
            with full.open_store("dead") as dead:
                save(dead, boundary=1, sizes=(20 * MIB,))
        else:
            kept = jobs.enter_context(full.open_store("kept"))
            jobs.enter_context(kept.offering(save(kept, boundary=1, sizes=(20 * MIB,))))  # is asked first
        save(asking, boundary=2, sizes=(30 * MIB,)).verify()
        assert (files(dropped.directory), files(place)) == (["A.gsnp"], [])
        assert full.boundaries({"own": "b", "a dead job's": "dead"}.get(whose, "kept")) >= {1}


def test_a_slot_that_cannot_be_moved_does_not_keep_the_other_from_moving(
    full: RamDisk, place: Path, save: Save
) -> None:
    with full.open_store("a") as store:
        save(store, boundary=1, sizes=(20 * MIB,))
        with store.offering(save(store, boundary=2, sizes=(100,))):
            assert request_room(store.directory)
            assert (files(store.directory), files(place)) == (["A.gsnp"], ["a.r0.B.gsnp"])
            with pytest.raises(RamDiskFullError, match="spill"):
                request_room(store.directory)


def test_what_a_script_knows_the_path_of_stays(
    disk: RamDisk, store: JobStore, place: Path, save: Save
) -> None:
    snapshot = save(store, boundary=1, sizes=(40 * MIB,))
    store.handed_out = True
    with store.offering(snapshot):
        assert not request_room(store.directory)
    with pytest.raises(RamDiskFullError):
        save(store, boundary=2, sizes=(40 * MIB,))
    assert files(place) == []
    snapshot.verify()
