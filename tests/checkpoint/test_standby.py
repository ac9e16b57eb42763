"""Waiting for a store until the process that has it has ended."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import settle
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import UsageError

from ..patience import PATIENCE_S
from .conftest import Save


class Waiting:
    """Stands by in a thread; `result` is what came of it."""

    def __init__(self, disk: RamDisk) -> None:
        self._found: list[JobStore | None] = []
        waiting = threading.Event()
        self._thread = threading.Thread(
            target=lambda: self._found.append(disk.stand_by("j", waiting=waiting.set))
        )
        self._thread.start()
        assert waiting.wait(PATIENCE_S)

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> JobStore | None:
        self._thread.join(PATIENCE_S)
        return self._found[0]


def test_a_store_that_nobody_has_is_there_at_once(disk: RamDisk) -> None:
    store = disk.stand_by("j")
    assert store is not None
    with pytest.raises(UsageError, match="running already"):
        disk.open_store("j")
    store.close(keep=False)


def test_what_was_left_is_taken_over_when_the_store_is_let_go(disk: RamDisk, save: Save) -> None:
    first = disk.open_store("j")
    waiting = Waiting(disk)
    save(first, boundary=7)
    assert waiting.waits
    first.close(keep=True)
    store = waiting.result()
    assert store is not None
    assert set(store.restartable()) == {7}
    with store.restartable()[7] as snapshot:
        snapshot.verify()
    save(store, boundary=8)
    with store.restartable()[8] as snapshot:
        snapshot.verify()
    store.close(keep=False)


def test_a_death_without_a_snapshot_leaves_the_beginning(disk: RamDisk) -> None:
    first = disk.open_store("j")
    waiting = Waiting(disk)
    first._lock.release()  # what the kernel does for a dead process
    store = waiting.result()
    assert store is not None
    assert not store.restartable()
    store.close(keep=False)


def test_a_good_end_leaves_nothing(disk: RamDisk, save: Save) -> None:
    first = disk.open_store("j")
    waiting = Waiting(disk)
    save(first, boundary=7)
    assert waiting.waits
    first.close(keep=False)
    assert waiting.result() is None
    assert not list(disk.directory.glob("j.*"))


@pytest.mark.parametrize("by_itself", [True, False], ids=["its own process", "another process"])
def test_what_was_spilled_is_taken_over_though_its_store_is_gone(
    shm: Path, place: Path, save: Save, by_itself: bool
) -> None:
    disk = RamDisk(shm / "disk", 64 << 20, spill_directory=place)
    first = disk.open_store("j")
    waiting = Waiting(disk)
    save(first, boundary=7)
    if by_itself:
        assert first._free_memory(0)
        first.close(keep=True)
    else:  # as one that was quicker to take the lock of the dead
        assert disk.spilled is not None
        with first._lock:
            disk.spilled.take(first.slots[0].arena.path, first.directory.name, 0)
            settle(first.directory)
    store = waiting.result()
    assert store is not None
    assert store.boundaries == [7]
    store.close(keep=False)
