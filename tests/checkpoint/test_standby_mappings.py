"""Files mapped ahead: used if they are the ones that are opened, and read anew if not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.standby_mappings import StandbyMappings

from .conftest import MIB, Save


@pytest.fixture
def path(shm: Path) -> Path:
    file = shm / "file"
    file.write_bytes(bytes(range(256)) * 64)
    return file


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


def test_what_is_written_later_is_seen(path: Path, descriptor: int) -> None:
    standby = StandbyMappings([path])
    standby.look()
    os.pwrite(descriptor, b"later", 100)
    memory = standby.mapping(descriptor, 200)
    assert memory is not None
    assert memory.readonly
    assert (len(memory), bytes(memory[99:106])) == (200, b"\x63later\x69")


def test_a_file_that_has_grown_is_mapped_at_the_next_look(path: Path, descriptor: int) -> None:
    standby = StandbyMappings([path])
    standby.look()
    os.pwrite(descriptor, bytes(8192), path.stat().st_size)
    length = path.stat().st_size
    assert standby.mapping(descriptor, length) is None
    standby.look()
    assert standby.mapping(descriptor, length) is not None


def test_another_file_in_its_place_is_not_taken_for_it(path: Path) -> None:
    standby = StandbyMappings([path, path.with_name("missing")])
    standby.look()
    other = path.with_name("other")
    other.write_bytes(b"other")
    other.replace(path)
    with path.open("rb") as opened:
        assert standby.mapping(opened.fileno(), 5) is None
        standby.look()
        memory = standby.mapping(opened.fileno(), 5)
        assert memory is not None
        assert bytes(memory) == b"other"


def test_a_file_with_holes_stays_as_it_is(shm: Path) -> None:
    path = shm / "holes"
    path.touch()
    os.truncate(path, MIB)
    standby = StandbyMappings([path])
    standby.look()
    with path.open("rb") as opened:
        assert standby.mapping(opened.fileno(), MIB) is None
    assert path.stat().st_blocks == 0


def test_the_thread_ends(path: Path, descriptor: int) -> None:
    with StandbyMappings([path]) as standby:
        pass
    assert not standby._thread.is_alive()


def test_a_snapshot_is_read_through_it_and_checked(store: JobStore, save: Save) -> None:
    path = save(store, boundary=1, restartable=False).path
    standby = StandbyMappings([path])
    standby.look()
    save(store, boundary=2, restartable=False)
    with open_snapshot(path, standby) as snapshot, path.open("rb") as opened:
        memory = standby.mapping(opened.fileno(), snapshot.record.file_len)
        assert memory is not None
        assert snapshot.arena.obj is memory.obj
        assert snapshot.boundary == 2
        snapshot.verify()
