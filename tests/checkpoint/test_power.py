"""A power cut at every step of a publish, where the RAM disk lies on a disk: what was not flushed is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import CorruptSnapshotError

from .conftest import MIB

CHANGING = ("open", "ftruncate", "posix_fallocate", "pwrite", "replace", "unlink", "fsync")
PAGE = 4096
NBYTES = MIB // 2 + 4


class Medium:
    """What a disk may hold of one directory, if the power is cut before or after any call that changes it.

    Certain are the bytes of a file at its last flush, and the names at that of the directory. Of the rest
    everything may be there, nothing, the names without the bytes, or every other page.
    """

    def __init__(self, patch: pytest.MonkeyPatch, directory: Path) -> None:
        self.directory = directory
        self.names: dict[str, int] = {}
        self.contents: dict[int, bytes] = {}
        self.states: dict[bytes, dict[str, bytes]] = {}
        for name in CHANGING:
            patch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            if function.__name__ != "open":
                self.look()
            result = function(*arguments, **options)
            if function.__name__ == "fsync":
                self.flushed(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            return result

        return watched

    def now(self) -> tuple[dict[str, int], dict[int, bytes]]:
        """Names and bytes as every process sees them, what is mapped included."""
        paths = sorted(self.directory.iterdir())
        names = {path.name: path.stat().st_ino for path in paths}
        return names, {path.stat().st_ino: path.read_bytes() for path in paths}

    def flushed(self, path: Path) -> None:
        names, contents = self.now()
        if path == self.directory:
            self.names = names
        elif path.parent == self.directory:
            self.contents[names[path.name]] = contents[names[path.name]]

    def look(self) -> None:
        """Note what may be on the medium now."""
        names, contents = self.now()
        old = self.contents
        zeros = {inode: old.get(inode, b"").ljust(len(data), b"\0") for inode, data in contents.items()}
        torn = {inode: mixed(zeros[inode], data) for inode, data in contents.items()}
        for there in (self.names, names):
            for known in (old, zeros, torn, contents):
                state = {name: known.get(inode, old.get(inode, b"")) for name, inode in there.items()}
                key = xxh3_128()
                for name, data in state.items():
                    key.update(f"{name} {len(data)} ".encode() + data)
                self.states.setdefault(key.digest(), state)


def mixed(old: bytes, new: bytes) -> bytes:
    """Every other page of both."""
    pages = range(0, len(new), PAGE)
    return b"".join((new if at // PAGE % 2 else old)[at : at + PAGE] for at in pages)


def save(store: JobStore, boundary: int) -> None:
    with store.begin(Layout((StorageSpec(NBYTES), StorageSpec(8)))) as writer:
        writer.view(0)[:] = bytes([boundary]) * NBYTES
        writer.view(1)[:] = boundary.to_bytes(8, "little")
        writer.publish(tree.encode(boundary), [], boundary=boundary, restartable=True)


def found(disk: RamDisk) -> set[int]:
    """The boundaries that a successor can go on from, every byte of them compared."""
    with disk.open_store("a") as store:
        for boundary, snapshot in store.restartable().items():
            with snapshot:
                snapshot.verify()
                assert set(snapshot.view(0)) == {boundary}
                assert int.from_bytes(snapshot.view(1), "little") == boundary == tree.decode(snapshot.tree)
        return set(store.restartable())


@pytest.mark.parametrize("saved", [0, 1, 3])
def test_whatever_is_lost_every_snapshot_that_counts_is_whole(shm: Path, saved: int) -> None:
    with pytest.MonkeyPatch.context() as patch, RamDisk(shm / "disk").open_store("a") as store:
        medium = Medium(patch, store.directory)
        for boundary in range(1, saved + 1):
            save(store, boundary)
        medium.states.clear()
        save(store, saved + 1)
        on_the_way = list(medium.states.values())
        medium.states.clear()
        medium.look()
        at_last = list(medium.states.values())
        slots = {path.name: path.read_bytes() for path in store.directory.glob("*.gsnp")}
    outcomes = set()
    for number, state in enumerate([*on_the_way, *at_last]):
        directory = shm / f"cut{number}" / "a.r0"
        directory.mkdir(parents=True, mode=0o700)
        directory.parent.chmod(0o700)
        for name, data in state.items():
            (directory / name).write_bytes(data)
            (directory / name).chmod(0o600)
        boundaries = found(disk := RamDisk(directory.parent))
        outcomes.add(frozenset(boundaries))
        assert max(boundaries, default=0) in {saved, saved + 1}
        disk.collect(everything=True)
        assert os.listdir(disk.directory) == ["lock"]
    on_the_medium = [{name: state.get(name) for name in slots} for state in at_last]
    assert all(found == slots for found in on_the_medium), "not all of it is on the medium"
    newer = frozenset({saved, saved + 1} - {0})
    assert newer in outcomes
    assert outcomes <= {newer, frozenset({saved} - {0}), frozenset({saved - 1, saved} - {0, -1})}


@pytest.mark.parametrize("forgotten", ["files", "names"])
def test_a_flush_that_is_missing_is_noticed(
    shm: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    flushed = Medium.flushed

    def some_flushed(medium: Medium, path: Path) -> None:
        if (forgotten == "names") != path.is_dir():
            flushed(medium, path)

    monkeypatch.setattr(Medium, "flushed", some_flushed)
    with pytest.raises((AssertionError, CorruptSnapshotError)):
        test_whatever_is_lost_every_snapshot_that_counts_is_whole(shm, 1)
