"""Sender and receiver while something goes wrong: an end dies, bytes change, the room is not enough."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.ramdisk.budget import Tenant
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import pieces_of, read_owner
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import (
    CorruptSnapshotError,
    RamDiskFullError,
    RemoteProtocolError,
    ReplacedSnapshotError,
)
from gpuslice.nodes.sender import Sender

from .ends import GANGS, JOB, a_receiver, a_sender, flipped, gangs, portions, transfer
from .synthetic import SIZES, Storages, boundaries, found, storages, take


def test_a_snapshot_that_is_spilled_while_it_is_sent_arrives(
    source: Path, target: Path, tmp_path: Path
) -> None:
    spill = tmp_path / "spill"
    take(source, JOB, 4, [storages(1)], spill=spill)
    sender, held = a_sender(source, spill)
    receiver = a_receiver(target)
    sending = portions(sender, held, receiver)
    receiver.put(*next(sending))
    RamDisk(source, spill_directory=spill).spill()
    # As a process does that leaves its slot: whoever has it mapped reads zeros from now on.
    _punch(sender)
    for one in sending:
        receiver.put(*one)
    receiver.publish()
    assert found(target, JOB, 4) == storages(1)
    assert held.boundary == 4


def _punch(sender: Sender) -> None:
    from gpuslice.kernels.host.memory_files import map_nothing

    offered = sender._offered[0]
    offered.snapshot.attach(map_nothing(offered.snapshot.record.file_len))


@gangs
def test_a_receiver_that_died_is_followed_by_one_that_asks_for_the_rest(
    source: Path, target: Path, shm: Path, contents: list[Storages]
) -> None:
    ranks = len(contents)
    take(source, JOB, 7, contents)
    sender, held = a_sender(source)
    undisturbed = transfer(*a_sender(source), a_receiver(shm / "undisturbed"))
    first = a_receiver(target)
    # The last rank is on its way: only its last portion has not arrived.
    sent = sum(first.put(*one) for one in list(portions(sender, held, first))[:-1])
    first.abandon()  # as its death does: the kernel lets go of the locks, all else stays
    assert boundaries(target, JOB, ranks) == [set()] * ranks
    more = transfer(sender, held, a_receiver(target))
    assert [found(target, JOB, 7, rank) for rank in range(ranks)] == contents
    assert more == undisturbed - sent


@gangs
def test_what_was_damaged_after_it_had_arrived_is_sent_again(
    source: Path, target: Path, contents: list[Storages]
) -> None:
    take(source, JOB, 7, contents)
    sender, held = a_sender(source)
    first = a_receiver(target)
    first.put(*next(portions(sender, held, first)))
    first.abandon()
    store = target / f"{JOB}.r0"
    (piece,) = pieces_of(store / "A.gsnp") or [None]
    _flip(*((store / "A.gsnp", 1_000_000) if piece is None else (piece, 1_000)))
    assert transfer(sender, held, a_receiver(target)) >= sum(SIZES)
    assert [found(target, JOB, 7, rank) for rank in range(len(contents))] == contents


@gangs
def test_a_flipped_byte_on_the_way_is_noticed(source: Path, target: Path, contents: list[Storages]) -> None:
    ranks = len(contents)
    take(source, JOB, 2, contents)
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    sending = portions(sender, held, receiver)
    receiver.put(*next(sending))
    header, data = next(sending)
    with pytest.raises(CorruptSnapshotError, match="is not what was sent"):
        receiver.put(header, flipped(data, len(data) - 1))
    with pytest.raises(RemoteProtocolError, match="not whole"):
        receiver.publish()
    receiver.abandon()
    assert boundaries(target, JOB, ranks) == [set()] * ranks
    transfer(sender, held, a_receiver(target))
    assert [found(target, JOB, 2, rank) for rank in range(ranks)] == contents


def test_a_byte_that_flips_in_the_target_is_noticed_before_anything_is_published(
    source: Path, target: Path
) -> None:
    take(source, JOB, 2, [storages(1)])
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    for one in portions(sender, held, receiver):
        receiver.put(*one)
    _flip(target / f"{JOB}.r0" / "A.gsnp", 5_000_000)
    with pytest.raises(CorruptSnapshotError, match="is not what was sent"):
        receiver.publish()
    receiver.abandon()
    assert boundaries(target, JOB) == [set()]
    transfer(*a_sender(source), a_receiver(target))
    assert found(target, JOB, 2) == storages(1)


def _flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        data = os.pread(opened.fileno(), 1, at)
        os.pwrite(opened.fileno(), flipped(data), at)


def test_damage_at_the_source_is_never_sent(source: Path, target: Path) -> None:
    take(source, JOB, 2, [storages(1)])
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    sending = portions(sender, held, receiver)
    receiver.put(*next(sending))
    _flip(source / f"{JOB}.r0" / "A.gsnp", 5_000_000)
    with pytest.raises(CorruptSnapshotError, match="changed since it was checked"):
        list(sending)
    sender, held = a_sender(source)
    with pytest.raises(CorruptSnapshotError, match="storage 0"):
        sender.offer(0)


def test_a_snapshot_that_is_replaced_meanwhile_is_given_up_for_the_newer_one(
    source: Path, target: Path
) -> None:
    take(source, JOB, 1, [storages(1)])
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    sending = portions(sender, held, receiver)
    receiver.put(*next(sending))
    take(source, JOB, 2, [storages(2)])
    receiver.put(*next(sending))  # the older one is whole still
    take(source, JOB, 3, [storages(3)])
    with pytest.raises(ReplacedSnapshotError, match="boundary 1"):
        list(sending)
    receiver.abandon()
    transfer(*a_sender(source), a_receiver(target))
    assert found(target, JOB, 3) == storages(3)


@gangs
def test_a_full_ram_disk_is_as_before(source: Path, target: Path, contents: list[Storages]) -> None:
    ranks = len(contents)
    before = [storages(9 + rank) for rank in range(ranks)]
    take(target, JOB, 1, before)
    take(source, JOB, 2, contents)
    sender, held = a_sender(source)
    limit = RamDisk(target).used_bytes + 8_000_000
    with pytest.raises(RamDiskFullError, match="is full"):
        transfer(sender, held, a_receiver(target, ramdisk_limit=str(limit)))
    assert boundaries(target, JOB, ranks) == [{1}] * ranks
    assert [found(target, JOB, 1, rank) for rank in range(ranks)] == before
    assert RamDisk(target).used_bytes <= limit - 8_000_000
    transfer(sender, held, a_receiver(target))  # nobody holds the stores


@pytest.mark.parametrize("contents", [GANGS["different"], GANGS["alike"]], ids=["different", "alike"])
def test_ranks_keep_what_they_have_in_common_though_one_cannot_be_published(
    source: Path, target: Path, contents: list[Storages], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [storages(8), storages(9)]
    take(target, JOB, 1, before)
    take(source, JOB, 2, contents)
    publish = SnapshotWriter.publish

    def fails(writer: SnapshotWriter, *arguments: Any, **options: Any) -> Any:
        if writer._record.rank == 1:
            raise RamDiskFullError("there is no room for what is not tensors")
        return publish(writer, *arguments, **options)

    for _ in range(2):  # the second time the first rank has it already
        with monkeypatch.context() as patch:
            patch.setattr(SnapshotWriter, "publish", fails)
            with pytest.raises(RamDiskFullError):
                transfer(*a_sender(source), a_receiver(target))
        assert boundaries(target, JOB, 2) == [{1, 2}, {1}]
        assert [found(target, JOB, 1, rank) for rank in range(2)] == before
    transfer(*a_sender(source), a_receiver(target))
    assert boundaries(target, JOB, 2) == [{2}, {2}]
    assert [found(target, JOB, 2, rank) for rank in range(2)] == contents


def test_the_tenant_of_a_job_has_its_limit_on_the_target_too(source: Path, target: Path) -> None:
    take(target, "other", 2, [storages(2)], tenant=Tenant("ann"))
    for limit_bytes, boundary in ((14_000_000, 2), (40_000_000, 3)):
        take(source, JOB, boundary, [storages(1)], tenant=Tenant("ann", limit_bytes))
        RamDisk(source).collect()
        sender, held = a_sender(source)
        if boundary == 2:
            with pytest.raises(RamDiskFullError, match="tenant ann"):
                transfer(sender, held, a_receiver(target))
        else:
            transfer(sender, held, a_receiver(target))
    assert found(target, JOB, 3) == storages(1)
    owner = read_owner(target / f"{JOB}.r0")
    assert owner is not None
    assert (owner.tenant, owner.tenant_limit_bytes) == ("ann", 40_000_000)
