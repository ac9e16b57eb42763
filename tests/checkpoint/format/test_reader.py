"""Writing, publishing, opening and reading one snapshot."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.export_safetensors import export_safetensors
from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.errors import (
    CorruptSnapshotError,
    EnvironmentUnusableError,
    RefusedSnapshotError,
    UsageError,
)

from ..conftest import address_of, newest_of

Save = Callable[..., SnapshotFile]
Pattern = Callable[[int, int, int], bytes]
LAYOUT = Layout((StorageSpec(4096, "cpu", "weights"),))


def test_a_snapshot_reads_as_it_was_written(disk: RamDisk, save: Save, pattern: Pattern) -> None:
    with disk.open_store("a", 2) as store:
        written = save(store, boundary=41, value={"epoch": 3})
        with open_snapshot(written.path) as read:
            for snapshot in (written, read):
                snapshot.verify()
                assert (snapshot.boundary, snapshot.generation, snapshot.restartable) == (41, 1, True)
                assert (snapshot.record.job, snapshot.record.rank) == ("a", 2)
                assert tree.decode(snapshot.tree) == {"epoch": 3}
                assert snapshot.nbytes == sum(storage.nbytes for storage in snapshot.storages)
                for sid, storage in enumerate(snapshot.storages):
                    view = snapshot.view(sid)
                    assert view.readonly
                    assert view == pattern(41, sid, storage.nbytes)
            assert read.storages == written.storages
            assert read.tensors == written.tensors
            assert read.record == written.record


def test_large_views_are_page_aligned_and_written_in_place(disk: RamDisk) -> None:
    layout = Layout((StorageSpec(100), StorageSpec(3 << 20), StorageSpec(100), StorageSpec(1 << 20)))
    with disk.open_store(None) as store, store.begin(layout) as writer:
        start = address_of(writer.arena)
        views = [writer.view(sid) for sid in range(4)]
        assert [address_of(view) % 4096 for view in (views[1], views[3])] == [0, 0]
        assert [address_of(view) % 256 for view in (views[0], views[2])] == [0, 0]
        assert all(start < address_of(view) < start + len(writer.arena) for view in views)
        assert not any(view.readonly for view in views)
        views[1][5] = 77
        snapshot = writer.publish(tree.encode(None), [], boundary=1, restartable=False)
        assert address_of(snapshot.view(1)) == address_of(views[1])
        assert snapshot.view(1)[5] == 77


def test_an_empty_snapshot_is_one_too(disk: RamDisk) -> None:
    with disk.open_store("empty") as store:
        snapshot = store.begin(Layout(())).publish(tree.encode({}), [], boundary=0, restartable=True)
        with open_snapshot(snapshot.path) as read:
            read.verify()
            assert read.nbytes == 0
        assert set(load_file(snapshot.path)) == {"__gsnp.tail", "__gsnp.slack"}


def test_a_tail_larger_than_expected_lengthens_the_file(disk: RamDisk) -> None:
    with disk.open_store("tail") as store:
        value = {"log": "x" * (5 << 20)}
        snapshot = store.begin(LAYOUT).publish(tree.encode(value), [], boundary=1, restartable=True)
        with open_snapshot(snapshot.path) as read:
            read.verify()
            assert tree.decode(read.tree) == value
        again = store.begin(LAYOUT).publish(tree.encode(value), [], boundary=2, restartable=True)
        assert newest_of(disk, "tail") == again.path
        load_file(again.path)


def test_a_copied_file_verifies_on_its_own(snapshot_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gsnp"
    shutil.copyfile(snapshot_path, copy)
    copy.chmod(0o600)
    with open_snapshot(copy) as snapshot:
        snapshot.verify()
        assert snapshot.boundary == 7


def test_publish_refuses_what_could_not_be_opened(disk: RamDisk) -> None:
    with disk.open_store("a") as store:
        writer = store.begin(LAYOUT)
        wrong = TensorSpec("w", 0, "float32", (1025,), (1,))
        with pytest.raises(UsageError, match="'w' reaches beyond the 4096 bytes of storage 0"):
            writer.publish(tree.encode(None), [wrong], boundary=1, restartable=True)
        with pytest.raises(UsageError, match="negative"):
            writer.publish(tree.encode(None), [], boundary=-1, restartable=True)
        assert newest_of(disk, "a") is None
        writer.publish(tree.encode(None), [], boundary=1, restartable=True)
        assert newest_of(disk, "a") is not None


def test_what_could_not_be_read_back_is_not_published(disk: RamDisk) -> None:
    with disk.open_store("a") as store:
        with pytest.raises(UsageError, match="cannot hold 1048577 storages"):
            store.begin(Layout((StorageSpec(1),) * ((1 << 20) + 1)))
        with store.begin(LAYOUT) as writer:
            large = tree.encode("x" * (65 << 20))
            with pytest.raises(UsageError, match=r"takes 65\.00 MiB"):
                writer.publish(large, [], boundary=1, restartable=True)
        assert newest_of(disk, "a") is None


def test_closing_the_store_ends_its_writer(disk: RamDisk) -> None:
    store = disk.open_store("a")
    writer = store.begin(LAYOUT)
    store.close(keep=True)
    with pytest.raises(UsageError, match="published or aborted"):
        writer.publish(tree.encode(None), [], boundary=1, restartable=True)
    writer.abort()
    assert not store.directory.exists()


def test_a_writer_ends_with_publish_or_abort(disk: RamDisk) -> None:
    with disk.open_store("a") as store:
        writer = store.begin(LAYOUT)
        with pytest.raises(UsageError, match="written already"):
            store.begin(LAYOUT)
        writer.abort()
        writer.abort()
        with pytest.raises(UsageError, match="published or aborted"):
            writer.view(0)
        with store.begin(LAYOUT) as writer:
            writer.publish(tree.encode(None), [], boundary=1, restartable=True)
        with pytest.raises(UsageError, match="published or aborted"):
            _ = writer.arena
        assert newest_of(disk, "a") is not None


def test_a_changed_description_is_noticed(disk: RamDisk) -> None:
    first, second = (
        TensorSpec("w", 0, "float32", shape, stride) for shape, stride in [((4,), (1,)), ((2,), (2,))]
    )
    with disk.open_store("a") as store:
        for boundary, tensors in enumerate([[first], [first], [second], [first, second], []]):
            snapshot = store.begin(LAYOUT).publish(
                tree.encode(boundary), tensors, boundary=boundary, restartable=True
            )
            with open_snapshot(snapshot.path) as read:
                assert read.tensors == tuple(tensors)
                assert tree.decode(read.tree) == boundary


@pytest.mark.parametrize("sid", range(5))
def test_a_damaged_storage_is_named(snapshot_path: Path, sid: int) -> None:
    with open_snapshot(snapshot_path) as snapshot:
        nbytes, offset = snapshot.storages[sid].nbytes, snapshot.content.placement.offsets[sid]
        others = [other for other in range(len(snapshot.storages)) if other != sid]
    if nbytes == 0:
        return
    with snapshot_path.open("r+b") as file:
        file.seek(offset + nbytes - 1)
        last = file.read(1)
        file.seek(offset + nbytes - 1)
        file.write(bytes([last[0] ^ 1]))
    with open_snapshot(snapshot_path) as snapshot:
        with pytest.raises(CorruptSnapshotError, match=rf"storage {sid} \(storage-{sid}\)"):
            snapshot.view(sid)
        with pytest.raises(CorruptSnapshotError, match=rf"storage {sid} "):
            snapshot.verify()
        for other in others:
            snapshot.view(other)


def test_a_damaged_padding_is_found(snapshot_path: Path) -> None:
    with open_snapshot(snapshot_path) as snapshot:
        offset = snapshot.content.placement.offsets[0] + snapshot.storages[0].nbytes
    with snapshot_path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff")
    with open_snapshot(snapshot_path) as snapshot, pytest.raises(CorruptSnapshotError):
        snapshot.verify()


def test_a_closed_snapshot_says_so_and_its_views_live_on(snapshot_path: Path) -> None:
    with open_snapshot(snapshot_path) as snapshot:
        view = snapshot.view(1)
    with pytest.raises(UsageError, match="is closed"):
        snapshot.view(1)
    with pytest.raises(UsageError, match="is closed"):
        snapshot.verify()
    assert len(bytes(view)) == 1 << 20


def test_opening_leaves_no_descriptors(snapshot_path: Path, tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.touch(mode=0o600)
    junk.write_bytes(b"no snapshot " * 1000)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with open_snapshot(snapshot_path) as snapshot:
            snapshot.view(0)
        with pytest.raises(CorruptSnapshotError):
            open_snapshot(junk)
    assert len(os.listdir("/proc/self/fd")) == before


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(RefusedSnapshotError, match="there is no snapshot"):
        open_snapshot(tmp_path / "nothing")


def test_a_symbolic_link_is_refused(snapshot_path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gsnp"
    link.symlink_to(snapshot_path)
    with pytest.raises(RefusedSnapshotError, match=r"cannot open .*link\.gsnp: it is a symbolic link"):
        open_snapshot(link)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(RefusedSnapshotError, match="not a regular file"):
            open_snapshot(path)


def test_a_file_that_others_may_write_is_refused(snapshot_path: Path) -> None:
    for mode in (0o620, 0o602):
        snapshot_path.chmod(mode)
        with pytest.raises(RefusedSnapshotError, match="written by others"):
            open_snapshot(snapshot_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_foreign_file_is_refused(snapshot_path: Path) -> None:
    os.chown(snapshot_path, 12345, -1)
    with pytest.raises(RefusedSnapshotError, match="belongs to user 12345"):
        open_snapshot(snapshot_path)


def test_a_file_that_cannot_be_mapped_is_refused(
    snapshot_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(mmap, "mmap", broken)
    with pytest.raises(RefusedSnapshotError, match=r"cannot read .* No such device"):
        open_snapshot(snapshot_path)


def test_another_version_is_refused(snapshot_path: Path) -> None:
    data = bytearray(snapshot_path.read_bytes()[:100])
    position = data.index(b'"gsnp":"2"') + 8
    with snapshot_path.open("r+b") as file:
        file.seek(position)
        file.write(b"1")
    with pytest.raises(RefusedSnapshotError, match="another version"):
        open_snapshot(snapshot_path)


def test_export_writes_plain_tensors(snapshot_path: Path, tmp_path: Path, pattern: Pattern) -> None:
    out = tmp_path / "out.safetensors"
    with open_snapshot(snapshot_path) as snapshot:
        assert export_safetensors(snapshot, out) == len(snapshot.tensors)
    loaded = load_file(out)
    assert set(loaded) == {tensor.path for tensor in snapshot.tensors}
    weight = np.frombuffer(pattern(7, 0, 5 << 20), np.uint32).reshape(1280, 1024)
    assert np.array_equal(loaded["model.weight"].numpy().view(np.uint32), weight)
    assert np.array_equal(loaded["model.tied"].numpy().view(np.uint32), weight.T)
    assert np.array_equal(
        loaded["model.every_other"].numpy(), np.frombuffer(pattern(7, 2, 100), np.int16)[::2]
    )
    assert loaded["z"].shape == (512, 8)
    assert os.listdir(tmp_path) == ["out.safetensors"]


def test_export_gives_doubles_a_number(disk: RamDisk, tmp_path: Path) -> None:
    tensors = [
        TensorSpec(name, 0, "int8", (i,), (1,))
        for i, name in enumerate(["a", "a", "a#2", "__metadata__", "a"])
    ]
    with disk.open_store(None) as store:
        snapshot = store.begin(LAYOUT).publish(tree.encode(None), tensors, boundary=1, restartable=False)
        export_safetensors(snapshot, tmp_path / "x")
    loaded = load_file(tmp_path / "x")
    assert len(loaded) == 5
    assert sorted(len(tensor) for tensor in loaded.values()) == [0, 1, 2, 3, 4]


def test_export_of_a_damaged_snapshot_leaves_the_target_alone(snapshot_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    with open_snapshot(snapshot_path) as snapshot:
        offset = snapshot.content.placement.offsets[4]
    with snapshot_path.open("r+b") as file:
        file.seek(offset)
        file.write(b"damaged")
    with open_snapshot(snapshot_path) as snapshot:
        with pytest.raises(CorruptSnapshotError):
            export_safetensors(snapshot, out)
        with pytest.raises(EnvironmentUnusableError, match="cannot write"):
            export_safetensors(snapshot, tmp_path / "no" / "where")
    assert out.read_text() == "precious"
    assert os.listdir(tmp_path) == ["out"]
