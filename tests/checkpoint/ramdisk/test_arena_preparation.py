"""Arenas that are made ready ahead of their suspend: exact, and never in anybody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch

from ..conftest import MIB, layout_of
from ..harness import FaultyDevice, Job, SpyGate

Save = Callable[..., SnapshotFile]


def finish(warming: threading.Thread | None) -> None:
    assert warming is not None
    warming.join()


def test_the_snapshot_finds_its_arena_mapped_and_faulted_in(disk: RamDisk) -> None:
    with disk.open_store(None) as store:
        mapped: list[int] = []
        store.bind(lambda memory: mapped.append(len(memory)), lambda memory: None)
        finish(store.warm_up(layout_of(20 * MIB)))
        assert len(mapped) == 1
        used = disk.used_bytes
        assert used >= mapped[0] >= 20 * MIB
        store.begin(layout_of(20 * MIB)).abort()
        assert len(mapped) == 1
        assert store.warm_up(layout_of(20 * MIB)) is None


def test_a_first_suspend_after_it_is_not_cold(store: JobStore, job: Job) -> None:
    before = job.digest()
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    finish(switch.warm_up())
    assert not switch.suspend(boundary=1).cold
    switch.resume()
    assert job.digest() == before


def test_a_suspend_that_comes_meanwhile_is_exact(store: JobStore, job: Job) -> None:
    before = job.digest()
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    assert switch.warm_up() is not None
    switch.suspend(boundary=1)
    switch.resume()
    assert job.digest() == before


def test_the_second_slot_is_warmed_while_the_first_holds_what_counts(disk: RamDisk, save: Save) -> None:
    with disk.open_store("two") as store:
        mapped: list[int] = []
        store.bind(lambda memory: mapped.append(len(memory)), lambda memory: None)
        first = save(store, boundary=1)
        finish(store.warm_up(first.content.layout))
        assert len(mapped) == 2
        second = save(store, boundary=2)
        assert len(mapped) == 2
        assert first.path != second.path
        first.verify()
        second.verify()


def test_it_takes_no_more_than_it_leaves_to_others(shm: Path) -> None:
    disk = RamDisk(shm / "small", 50 * MIB)
    with disk.open_store(None) as store:
        used = disk.used_bytes
        assert store.warm_up(layout_of(30 * MIB)) is None
        assert disk.used_bytes == used
        store.begin(layout_of(30 * MIB)).abort()


def test_no_thread_is_left_when_the_store_is_closed(disk: RamDisk) -> None:
    before = set(threading.enumerate())
    store = disk.open_store(None)
    store.warm_up(layout_of(100 * MIB))
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert all(name.startswith("gpuslice-") for name in names)
    store.close(keep=False)
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("no_more_threads")
def test_without_more_threads_the_suspend_makes_its_arena(store: JobStore, job: Job) -> None:
    before = job.digest()
    switch = Switch(FaultyDevice(), store, gate=SpyGate())
    assert switch.warm_up() is None
    switch.suspend(boundary=1)
    switch.resume()
    assert job.digest() == before
