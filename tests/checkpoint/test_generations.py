"""The snapshots of one store: which slot is next, which one counts, and the memory they are mapped in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format.gsnp import RECORD_BYTES
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk import arena
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.errors import (
    CorruptSnapshotError,
    EnvironmentUnusableError,
    UsageError,
)

from .conftest import MIB, address_of, layout_of, newest_of

Save = Callable[..., SnapshotFile]
Actor = Callable[..., Any]


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


def test_a_slot_that_is_being_written_is_no_snapshot(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        paths = [save(store, boundary=boundary).path for boundary in (1, 2)]
        with store.begin(layout_of(MIB)):
            with pytest.raises(CorruptSnapshotError, match="missing or torn"):
                open_snapshot(paths[0])
            assert newest_of(disk, "a") == paths[1]


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
        homes = [address_of(save(store, boundary=boundary).view(0)) for boundary in range(6)]
        assert homes[:2] * 3 == homes
        first, _, _ = (save(store, boundary=boundary) for boundary in (7, 8, 9))
        with pytest.raises(UsageError, match="closed or was overwritten"):
            first.view(0)


def test_a_job_that_nobody_can_restart_needs_one_arena(disk: RamDisk, save: Save) -> None:
    with disk.open_store("a") as store:
        homes = {address_of(save(store, boundary=i, restartable=False).view(0)) for i in range(4)}
        assert len(homes) == 1
        assert not (store.directory / "B.gsnp").exists()


def test_a_device_that_refuses_a_mapping_gets_it_again(disk: RamDisk, save: Save) -> None:
    registered: list[int] = []

    def refuse(memory: memoryview) -> None:
        raise EnvironmentUnusableError("the page-lock limit is reached")

    def register(memory: memoryview) -> None:
        registered.append(address_of(memory))

    def unregister(memory: memoryview) -> None:
        registered.remove(address_of(memory))

    with disk.open_store("a") as store:
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
        assert address_of(memory) not in registered
        registered[address_of(memory)] = len(memory)

    def unregister(memory: memoryview) -> None:
        assert len(memory) == registered.pop(address_of(memory))
        assert bytes(memory[:1]) in (b"\0", bytes([memory[0]]))

    other: list[memoryview] = []
    store = disk.open_store(None)
    save(store)
    store.bind(register, unregister)
    assert len(registered) == 1
    for _ in range(3):
        save(store)
    assert len(registered) == 2
    with store.begin(layout_of(40 * MIB)) as writer:
        assert len(registered) == 2
        assert registered[address_of(writer.arena)] == len(writer.arena) >= 40 * MIB
    store.bind(other.append, other.remove)
    assert registered == {}
    assert len(other) == 2
    store.close(keep=False)
    assert other == []


def test_pages_are_taken_near_the_device(disk: RamDisk, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: those of the first snapshot, of a larger one, and those made ready ahead."""
    where: list[int | None] = []
    inside: list[int | None] = [None]

    @contextmanager
    def near(node: int | None) -> Iterator[None]:
        inside[0] = node
        yield
        inside[0] = None

    def allocate(descriptor: int, offset: int, length: int) -> None:
        if length > RECORD_BYTES:  # an arena's pages, and not a record's
            where.append(inside[0])
        fallocate(descriptor, offset, length)

    fallocate = os.posix_fallocate
    monkeypatch.setattr(arena, "near", near)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with disk.open_store("a") as store:
        store.bind(lambda memory: None, lambda memory: None, 1)
        save(store, boundary=1)
        save(store, boundary=2)
        save(store, boundary=3, sizes=(20 * MIB,))
        warming = store.warm_up(layout_of(MIB))
        assert warming is None, "both slots are warm"
    with disk.open_store("b") as store:
        store.bind(lambda memory: None, lambda memory: None, 1)
        warming = store.warm_up(layout_of(MIB))
        assert warming is not None
        warming.join()
    assert len(where) > 3
    assert set(where) == {1}


def test_views_survive_the_growth_of_their_arena(disk: RamDisk) -> None:
    with disk.open_store(None) as store:
        writer = store.begin(layout_of(MIB))
        old = writer.view(0)
        old[:] = b"x" * MIB
        writer.abort()
        store.begin(layout_of(64 * MIB)).abort()
        assert bytes(old[-1:]) == b"x"


def test_two_slots_cost_little_more_than_twice_the_state(disk: RamDisk, save: Save) -> None:
    with disk.open_store(None) as store:
        for boundary in range(3):
            save(store, boundary=boundary, sizes=(60 * MIB,))
        (info,) = disk.listing()
        assert len(os.listdir(info.directory)) == 3
        assert info.bytes <= 2.15 * 60 * MIB


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
