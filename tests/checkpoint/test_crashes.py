"""A process that dies at any step of a save leaves a whole snapshot or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

from .conftest import MIB, layout_of, leftovers, newest_of

Save = Callable[..., SnapshotFile]
Actor = Callable[..., Any]


@pytest.mark.parametrize("saved", [0, pytest.param(1, marks=pytest.mark.repeats), 2])
def test_a_crash_at_any_step_leaves_a_whole_snapshot_or_none(shm: Path, actor: Actor, saved: int) -> None:
    outcomes = set()
    process = actor()
    for step in range(1, 40):
        disk = RamDisk(shm / f"step{step}", 256 * MIB)
        _, survived = process.ask("crash", directory=str(disk.directory), saved=saved, step=step)
        outcomes.add(check_after_crash(disk, saved, survived))
        if survived:
            break
    else:
        pytest.fail("the save never came to its end")
    assert outcomes == {saved, saved + 1}


def test_a_crash_around_a_save_leaves_nothing_that_gc_does_not_find(
    shm: Path, actor: Actor, save: Save
) -> None:
    process = actor()
    for step in range(1, 60):
        disk = RamDisk(shm / f"step{step}", 256 * MIB)
        _, survived = process.ask("crash_around", directory=str(disk.directory), step=step)
        if step % 2:
            disk.collect()
        else:  # a successor takes over whatever there is
            with disk.open_store("a") as store:
                save(store, boundary=1)
            disk.collect(everything=True)
        assert (leftovers(disk), disk.used_bytes) == ([], 0)
        if survived:
            assert step > 10
            break
    else:
        pytest.fail("it never came to its end")


def check_after_crash(disk: RamDisk, saved: int, survived: bool) -> int:
    """What the dead process left must be whole, usable by a successor, and collectable; its boundary."""
    path = newest_of(disk, "a")
    found = 0
    if path is not None:
        with open_snapshot(path) as snapshot:
            snapshot.verify()
            found = snapshot.boundary
            assert snapshot.view(0) == bytes([found]) * (3 * MIB)
            assert int.from_bytes(snapshot.view(1), "little") == found == tree.decode(snapshot.tree)
    allowed = {saved + 1} if survived else {saved, saved + 1}
    assert found in allowed
    with disk.open_store("a") as store, store.begin(layout_of(4 * MIB)) as writer:
        assert newest_of(disk, "a") == path
        writer.publish(tree.encode(None), [], boundary=99, restartable=False)
    assert [info.boundary for info in disk.collect(everything=True)] == ([found] if found else [])
    assert leftovers(disk) == []
    assert disk.used_bytes == 0
    return found
