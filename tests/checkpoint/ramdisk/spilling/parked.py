"""For tests of parked jobs whose room others need: a RAM disk that spills, and what lies where."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.checkpoint.ramdisk.store import JobStore

from ...conftest import MIB, SIZES, content

Actor = Callable[..., Any]
Save = Callable[..., SnapshotFile]
#: Two pieces of a move, and a little more.
NBYTES = 17 * MIB + 4


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.gsnp*"))


def holds(snapshot: SnapshotFile, boundary: int, sizes: tuple[int, ...] = SIZES) -> bool:
    """Whether it has every byte that ``save`` wrote at that boundary."""
    places = zip(snapshot.offsets, sizes, strict=True)
    views = [snapshot.arena[offset : offset + size] for offset, size in places]
    return all(view == content(boundary, sid, sizes[sid]) for sid, view in enumerate(views))


def leaves_nothing(disk: RamDisk, place: Path) -> None:
    """Collect everything, here and in the spill directory, and see that it is gone."""
    disk.collect(everything=True)
    assert (os.listdir(disk.directory), files(place)) == (["lock"], [])


def mapped(disk: RamDisk) -> int:
    return Path("/proc/self/maps").read_text().count(str(disk.directory))


@contextmanager
def spilled(store: JobStore, snapshot: SnapshotFile) -> Iterator[None]:
    """Inside the block all that can be moved out has been."""
    with store.offering(snapshot):
        while request_room(store.directory):
            pass
        yield


def found(disk: RamDisk) -> list[int]:
    """The boundaries that a successor can go on from, every byte of them compared."""
    with disk.open_store("a") as store:
        for boundary, snapshot in store.restartable().items():
            with snapshot:
                snapshot.verify()
                assert set(snapshot.view(0)) == {boundary}
        return sorted(store.restartable())
