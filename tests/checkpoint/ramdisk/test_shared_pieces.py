"""What ranks have in common is kept once, compared byte by byte, and survives each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gpuslice.checkpoint.format import tree
from gpuslice.checkpoint.format.checksums import ChecksumRecorder
from gpuslice.checkpoint.format.export_safetensors import export_safetensors
from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk import shared_pieces
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.room_requests import request_room
from gpuslice.checkpoint.ramdisk.slots import pieces_of
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import CorruptSnapshotError, RamDiskFullError, RefusedSnapshotError
from gpuslice.kernels import Device, open_device
from gpuslice.types import DeviceName

from ..conftest import MIB, leftovers, newest_of

RANKS = 4
#: Two large storages, one of several chunks with a ragged end, and small ones.
SIZES = (9 * MIB + 12, 2 * MIB, 300, 70_000)
STATE_BYTES = sum(SIZES)

State = list[torch.Tensor]


@pytest.fixture
def host() -> Device:
    return open_device(DeviceName("cpu", None))


@pytest.fixture
def gang(disk: RamDisk) -> Iterator[list[JobStore]]:
    """The open stores of four ranks."""
    stores = [disk.open_store("ddp", rank, ranks=range(RANKS)) for rank in range(RANKS)]
    yield stores
    for store in stores:
        store.close(keep=False)
    assert leftovers(disk) == []


def state(seed: int = 1) -> State:
    """Tensors of one storage each, with the bytes of this seed."""
    torch.manual_seed(seed)
    return [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in SIZES]


def save(
    store: JobStore,
    host: Device,
    storages: State,
    *,
    boundary: int = 1,
    restartable: bool = True,
    value: object = None,
) -> SnapshotFile:
    """As a suspend does it."""
    specs = (StorageSpec(one.nbytes, "cpu", f"storage-{sid}") for sid, one in enumerate(storages))
    with store.begin(Layout(tuple(specs)), share=True) as writer:
        writer.take(host, zip([one.untyped_storage() for one in storages], writer.offsets, strict=True))
        described = tree.encode(store.rank if value is None else value)
        return writer.publish(described, [], boundary=boundary, restartable=restartable)


def holds(snapshot: SnapshotFile, storages: State) -> bool:
    return all(snapshot.view(sid) == one.numpy().tobytes() for sid, one in enumerate(storages))


def test_equal_ranks_take_the_room_of_one(disk: RamDisk, gang: list[JobStore], host: Device) -> None:
    storages = state()
    for rank, store in enumerate(gang):
        snapshot = save(store, host, storages)
        assert holds(snapshot, storages)
        assert disk.used_bytes < STATE_BYTES + (rank + 1) * 0.2 * MIB
    assert sum(info.bytes for info in disk.listing()) == pytest.approx(disk.used_bytes, rel=0.01)
    with open_snapshot(gang[3].directory / "A.gsnp") as read:
        read.verify()
        assert (tree.decode(read.tree), holds(read, storages)) == (3, True)


@pytest.mark.parametrize("pages", range(1, 5))
def test_a_state_of_a_few_pages_is_read_again(gang: list[JobStore], host: Device, pages: int) -> None:
    """What lies behind the record in its file is as long as such a state, or longer."""
    storages = [torch.arange(pages * 4096 - 100, dtype=torch.int64).to(torch.uint8)]
    save(gang[0], host, storages)
    with open_snapshot(gang[0].directory / "A.gsnp") as read:
        read.verify()
        assert holds(read, storages)


def test_a_byte_that_differs_keeps_its_piece_apart(disk: RamDisk, gang: list[JobStore], host: Device) -> None:
    states = [state() for _ in gang]
    states[2][0][5 * MIB] ^= 1
    states[3][2][7] ^= 1
    snapshots = [save(store, host, mine) for store, mine in zip(gang, states, strict=True)]
    assert all(map(holds, snapshots, states))
    # One chunk of 4 MiB, and one piece of small storages.
    assert 4 * MIB < disk.used_bytes - STATE_BYTES < 4 * MIB + MIB


def test_equal_checksums_are_not_enough(
    gang: list[JobStore], host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChecksumRecorder, "sum_at", lambda recorder, offset: 7)
    monkeypatch.setattr(shared_pieces, "fingerprint", lambda data: (7).to_bytes(16))
    new = shared_pieces._new

    def new_at_last(path: Path, nbytes: int) -> int:
        time.sleep(0.02)  # the other threads that copy come to the same name meanwhile
        return new(path, nbytes)

    monkeypatch.setattr(shared_pieces, "_new", new_at_last)
    states = [state(seed) for seed in (1, 2, 1, 2)]
    snapshots = [save(store, host, mine) for store, mine in zip(gang, states, strict=True)]
    for store, snapshot, mine in zip(gang, snapshots, states, strict=True):
        assert holds(snapshot, mine)
        with open_snapshot(store.directory / "A.gsnp") as read:
            read.verify()
            assert holds(read, mine)


def test_what_others_need_outlives_its_writer(disk: RamDisk, host: Device) -> None:
    storages = state()
    stores = [disk.open_store("ddp", rank, ranks=range(RANKS)) for rank in range(RANKS)]
    for store in stores:
        save(store, host, storages)
    for gone, store in enumerate(stores):
        store.close(keep=False)
        for other in stores[gone + 1 :]:
            with open_snapshot(other.directory / "A.gsnp") as read:
                read.verify()
                assert holds(read, storages)
    assert (leftovers(disk), disk.used_bytes) == ([], 0)


def test_the_next_snapshot_takes_what_has_not_changed(
    disk: RamDisk, gang: list[JobStore], host: Device
) -> None:
    storages = state()
    for store in gang:
        save(store, host, storages, boundary=1)
    storages[1][5] ^= 1
    for boundary in (2, 3):
        for store in gang:
            save(store, host, storages, boundary=boundary)
        assert disk.used_bytes < STATE_BYTES + SIZES[1] + RANKS * 0.4 * MIB
    for store in gang:
        found = store.restartable()
        assert list(found) == [2, 3]
        assert all(holds(snapshot, storages) for snapshot in found.values())
        for snapshot in found.values():
            snapshot.close()


def test_who_lacks_room_leaves_the_others_as_they_were(shm: Path, host: Device) -> None:
    disk = RamDisk(shm / "small", STATE_BYTES + 2 * MIB)
    stores = [disk.open_store("ddp", rank, ranks=range(2)) for rank in range(2)]
    storages, other = state(1), state(2)
    save(stores[0], host, storages)
    with pytest.raises(RamDiskFullError):
        save(stores[1], host, other)
    assert disk.used_bytes < STATE_BYTES + MIB
    save(stores[1], host, storages)
    with open_snapshot(stores[0].directory / "A.gsnp") as read:
        assert holds(read, storages)
    for store in stores:
        store.close(keep=False)


def test_spilled_snapshots_are_whole_files_and_come_back(shm: Path, place: Path, host: Device) -> None:
    disk = RamDisk(shm / "disk", 256 * MIB, spill_directory=place)
    storages = state()
    for rank in range(2):
        store = disk.open_store("ddp", rank, ranks=range(2))
        save(store, host, storages, boundary=rank)
        store.abandon()
    assert [info.rank for info in disk.spill()] == [0, 1]
    assert disk.used_bytes == 0
    for spilled in place.glob("*.gsnp"):
        with open_snapshot(spilled) as read:
            read.verify()
            assert holds(read, storages)
    for rank in range(2):
        with disk.open_store("ddp", rank, ranks=range(2)) as store:
            found = store.restartable()
            assert holds(found[rank], storages)
            found[rank].close()
            again = save(store, host, storages, boundary=5)
            assert pieces_of(again.path) != []


def test_a_parked_rank_gives_its_room_and_has_its_state_again(shm: Path, place: Path, host: Device) -> None:
    disk = RamDisk(shm / "disk", 256 * MIB, spill_directory=place)
    stores = [disk.open_store("ddp", rank, ranks=range(2)) for rank in range(2)]
    storages = state()
    snapshots = [save(store, host, storages) for store in stores]
    with stores[0].offering(snapshots[0]):
        assert request_room(stores[0].directory)
    assert holds(snapshots[1], storages)
    with open_snapshot(snapshots[1].path) as read:
        read.verify()
    stores[0].bring_back(snapshots[0])
    assert holds(snapshots[0], storages)
    for store in stores:
        store.close(keep=False)


def test_a_piece_whose_writer_died_is_missing_and_taken_again(gang: list[JobStore]) -> None:
    layout, data = Layout((StorageSpec(MIB),)), bytes(range(256)) * (MIB // 256)
    key = shared_pieces.fingerprint(data)
    torn = gang[0].directory / f"A.{key.hex()}"
    torn.write_bytes(data[: MIB // 2].ljust(MIB, b"\0"))
    torn.chmod(0o600)
    with gang[0].begin(layout, share=True, resume=True) as writer:
        assert writer.missing([key]) == [0]
        assert not torn.exists()
        writer.put(0, memoryview(data))
        snapshot = writer.publish(tree.encode(None), [], boundary=1, restartable=True)
    assert snapshot.view(0) == data
    assert pieces_of(snapshot.path) == [torn]


def test_it_is_exported_like_any_other(gang: list[JobStore], host: Device, tmp_path: Path) -> None:
    weight = torch.arange(3 * MIB // 4, dtype=torch.int32).reshape(3, -1)
    spec = TensorSpec("model.weight", 0, "int32", tuple(weight.shape), weight.stride())
    for store in gang[:2]:
        with store.begin(Layout((StorageSpec(weight.nbytes),)), share=True) as writer:
            writer.take(host, [(weight.untyped_storage(), writer.offsets[0])])
            snapshot = writer.publish(tree.encode(None), [spec], boundary=1, restartable=True)
    with open_snapshot(snapshot.path) as read:
        assert export_safetensors(read, tmp_path / "out.safetensors") == 1
    assert torch.equal(load_file(tmp_path / "out.safetensors")["model.weight"], weight)
    with pytest.raises(SafetensorError):  # instead of zeros
        load_file(snapshot.path)


def test_a_slot_that_was_copied_alone_is_refused(gang: list[JobStore], host: Device, tmp_path: Path) -> None:
    save(gang[0], host, state())
    slot = gang[0].directory / "A.gsnp"
    (tmp_path / slot.name).write_bytes(slot.read_bytes())
    (tmp_path / slot.name).chmod(0o600)
    with pytest.raises(RefusedSnapshotError, match="is not beside it"):
        open_snapshot(tmp_path / slot.name)


def test_damage_is_found(gang: list[JobStore], host: Device) -> None:
    snapshot = save(gang[0], host, state())
    piece = max(pieces_of(snapshot.path), key=lambda path: path.stat().st_size)
    content = bytearray(piece.read_bytes())
    content[100] ^= 1
    piece.write_bytes(content)
    with open_snapshot(snapshot.path) as read, pytest.raises(CorruptSnapshotError, match="damaged"):
        read.verify()
    piece.write_bytes(content[:-4096])
    with pytest.raises(CorruptSnapshotError, match="another length"):
        open_snapshot(snapshot.path)
    rest = bytearray(snapshot.path.read_bytes())
    rest[-4096 + 8] ^= 1
    snapshot.path.write_bytes(rest)
    with pytest.raises(CorruptSnapshotError):
        open_snapshot(snapshot.path)


def test_a_rank_alone_and_a_handed_out_path_have_whole_files(disk: RamDisk, host: Device) -> None:
    with disk.open_store("alone", 0, ranks=range(1)) as store:
        snapshot = save(store, host, state())
        assert pieces_of(snapshot.path) == []
    with disk.open_store("ddp", 0, ranks=range(2)) as store:
        assert pieces_of(save(store, host, state(), boundary=1).path) != []
        store.whole_files = True
        for boundary in (2, 3):  # of which one overwrites the slot that was in pieces
            snapshot = save(store, host, state(boundary), boundary=boundary)
            assert pieces_of(snapshot.path) == []
            assert holds(snapshot, state(boundary))


def test_a_whole_file_in_a_slot_that_was_longer_in_pieces_is_whole(disk: RamDisk, host: Device) -> None:
    with disk.open_store("ddp", 0, ranks=range(2)) as store:
        for boundary in (1, 2):
            save(store, host, state(), boundary=boundary, value="x" * 20 * MIB)
        store.whole_files = True
        for boundary in (3, 4):
            snapshot = save(store, host, state(boundary), boundary=boundary)
            with open_snapshot(snapshot.path) as read:
                read.verify()
                assert (read.boundary, holds(read, state(boundary))) == (boundary, True)
        assert store.boundaries == [3, 4]


def test_ranks_at_the_same_moment_write_each_piece_once(disk: RamDisk, actor: Callable[..., Any]) -> None:
    process, nbytes = actor(), 24 * MIB
    for boundary in (1, 2, 3):
        asked = {"directory": str(disk.directory), "boundary": boundary, "nbytes": nbytes}
        assert process.ask("gang", **asked) == ("ok", [True] * 3)
        assert disk.used_bytes < min(boundary, 2) * nbytes + 3 * MIB
    for rank in range(3):
        with disk.open_store("ddp", rank, ranks=range(3)) as store:
            found = store.restartable()
            assert list(found) == [2, 3]
            for snapshot in found.values():
                with snapshot:
                    snapshot.verify()


def test_whoever_dies_while_all_write_leaves_the_others_whole(shm: Path, actor: Callable[..., Any]) -> None:
    process, nbytes = actor(), 12 * MIB
    for step in range(10, 130, 40):
        disk = RamDisk(shm / f"step{step}", 256 * MIB)
        asked = {"directory": str(disk.directory), "boundary": 1, "nbytes": nbytes}
        _, survived = process.ask("gang", **asked, die_in=step)
        assert survived[1:] == [True, True]
        for rank in (1, 2):
            with open_snapshot(disk.home("ddp", rank) / "A.gsnp") as read:
                read.verify()
        disk.collect()
        assert disk.used_bytes < nbytes + 2 * MIB
        disk.collect(everything=True)
        assert (leftovers(disk), disk.used_bytes) == ([], 0)


def test_a_crash_at_any_step_leaves_the_other_rank_whole(shm: Path, actor: Callable[..., Any]) -> None:
    process = actor()
    found = set()
    for step in range(1, 200, 5):
        disk = RamDisk(shm / f"step{step}", 256 * MIB)
        _, survived = process.ask("crash_sharing", directory=str(disk.directory), step=step)
        with open_snapshot(disk.home("ddp", 0) / "A.gsnp") as read:
            read.verify()
        newest = newest_of(disk, "ddp", 1)
        found.add(newest is not None)
        if newest is not None:
            with open_snapshot(newest) as read:
                read.verify()
                assert read.view(1)[0] == 1
        disk.collect(everything=True)
        assert (leftovers(disk), disk.used_bytes) == ([], 0)
        if survived:
            break
    else:
        pytest.fail("the save never came to its end")
    assert found == {False, True}
