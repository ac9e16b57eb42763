"""What a store offers to a process that goes on; test_ramdisk.py has the rest."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from gpuslice.checkpoint.format.layout import Layout
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.errors import EnvironmentUnusableError

from ..conftest import Save, newest_of


def test_a_later_snapshot_can_be_forgotten(disk: RamDisk, save: Save) -> None:
    with disk.open_store("gang") as store:
        for boundary in (3, 6):
            save(store, boundary=boundary, restartable=True)
    with disk.open_store("gang") as store:
        # Closing keeps the newest one only; killed processes leave both.
        assert list(store.restartable()) == [6]
        save(store, boundary=9, restartable=True)
        found = {boundary: snapshot.path for boundary, snapshot in store.restartable().items()}
        assert list(found) == [6, 9]
        store.forget_after(6)
        assert [snapshot.path for snapshot in store.restartable().values()] == [found[6]]
        assert newest_of(disk, "gang") == found[6]
        assert save(store, boundary=7, restartable=True).path != found[6]
        assert list(store.restartable()) == [6, 7]
    with disk.open_store("gang") as store:
        store.forget_after(-1)
        assert store.restartable() == {}
        assert newest_of(disk, "gang") is None


def test_it_tells_when_a_snapshot_was_published_or_given_up_and_which_there_are(
    disk: RamDisk, save: Save
) -> None:
    found: list[list[int]] = []
    with disk.open_store("gang") as store:
        store.finished = lambda: found.append(store.boundaries)
        save(store, boundary=3, restartable=True)
        save(store, boundary=4, restartable=False)
        save(store, boundary=6, restartable=True)
        store.begin(Layout(())).abort()
    assert found == [[3], [3], [3, 6], [6]]


def test_what_an_earlier_version_left_in_a_store_goes_with_it(disk: RamDisk, save: Save) -> None:
    """A file for each checkpoint that was being written, and one for a lock."""
    store = disk.open_store("gang")
    save(store, boundary=3, restartable=True)
    store.abandon()
    (store.directory / "writing.4").touch()
    (disk.directory / "comparing").touch()
    with disk.open_store("gang") as store:
        assert list(store.restartable()) == [3]
        save(store, boundary=4, restartable=True)
    assert sorted(path.name for path in store.directory.iterdir()) == ["B.gsnp", "owner"]
    disk.open_store("gang").close(keep=False)
    assert disk.listing() == []
    assert not store.directory.exists()


def test_a_device_that_cannot_let_go_of_an_arena_leaves_nothing_in_the_ram_disk(
    disk: RamDisk, save: Save
) -> None:
    def unmapping(memory: memoryview) -> None:
        raise EnvironmentUnusableError("cudaHostUnregister failed with CUDA error 719")

    store = disk.open_store(None)
    save(store, boundary=1)
    save(store, boundary=2)
    store.bind(lambda memory: None, unmapping)
    with pytest.raises(EnvironmentUnusableError, match="719"):
        store.close(keep=False)
    assert disk.listing() == []
    assert not list(store.directory.parent.rglob("*.gsnp"))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE], ids=["EMFILE", "ENFILE"])
def test_a_snapshot_that_lacks_a_descriptor_only_is_not_taken_for_none(
    disk: RamDisk, save: Save, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with disk.open_store("a") as store:
        save(store, boundary=7)
    real = os.open

    def fails(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(".gsnp"):
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        for use in (lambda: disk.open_store("a"), disk.collect, disk.listing, lambda: disk.boundaries("a")):
            with pytest.raises(EnvironmentUnusableError, match=os.strerror(code)):
                use()
    assert disk.boundaries("a") == {7}
