"""Sender and receiver in one process, without Ray: every byte arrives, what is not whole never counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuslice.checkpoint.ramdisk.budget import Tenant
from gpuslice.checkpoint.ramdisk.listing import restartable_files
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import read_owner
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import (
    CorruptSnapshotError,
    RamDiskFullError,
    RemoteProtocolError,
    ReplacedSnapshotError,
    SnapshotError,
    UsageError,
)
from gpuslice.nodes.messages import Held, Missing, Offer, Portion, decode, encode
from gpuslice.nodes.receiver import Receiver
from gpuslice.nodes.sender import Sender

from .synthetic import SIZES, boundaries, found, storages, take

JOB = "mnist"
#: So that pieces of 4 MiB go one by one, and small ones together.
PORTION_BYTES = 1 << 20


@pytest.fixture
def source(shm: Path) -> Path:
    return shm / "source"


@pytest.fixture
def target(shm: Path) -> Path:
    return shm / "target"


def a_sender(source: Path, spill: Path | None = None) -> tuple[Sender, Held]:
    flags = {"ramdisk_dir": str(source)} | ({} if spill is None else {"spill_dir": str(spill)})
    sender = Sender(flags)
    return sender, decode(sender.begin(JOB), Held)


def a_receiver(target: Path, **flags: str) -> Receiver:
    return Receiver({"ramdisk_dir": str(target), **flags}, portion_bytes=PORTION_BYTES)


def portions(sender: Sender, receiver: Receiver, rank: int) -> Iterator[tuple[bytes, bytes]]:
    """What is to be put, one after the other."""
    missing = decode(receiver.receive(sender.offer(rank)), Missing)
    for pieces in missing.portions:
        header = encode(Portion(rank, pieces))
        yield header, sender.portion(header)


def transfer(sender: Sender, held: Held, receiver: Receiver) -> int:
    """All of it; how many bytes had to be sent."""
    sent = sum(receiver.put(*one) for rank in held.ranks for one in portions(sender, receiver, rank))
    receiver.publish()
    return sent


def flipped(data: bytes, at: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_arrives_byte_for_byte(source: Path, target: Path, ranks: int) -> None:
    old, new = ([storages(seed + rank) for rank in range(ranks)] for seed in (10, 20))
    take(source, JOB, 3, old)
    take(source, JOB, 5, new)
    sender, held = a_sender(source)
    assert (held.boundary, held.ranks) == (5, tuple(range(ranks)))
    assert transfer(sender, held, a_receiver(target)) >= ranks * sum(SIZES)
    assert [found(target, JOB, 5, rank) for rank in range(ranks)] == new
    assert boundaries(target, JOB, ranks) == [{5}] * ranks


def test_what_ranks_share_is_sent_once_and_kept_once(source: Path, target: Path) -> None:
    common = storages(1)
    ranks = [[*common[:3], *storages(rank)[3:]] for rank in range(4)]
    take(source, JOB, 1, ranks)
    sender, held = a_sender(source)
    assert transfer(sender, held, a_receiver(target)) < 1.2 * sum(SIZES)
    assert [found(target, JOB, 1, rank) for rank in range(4)] == ranks
    assert RamDisk(target).used_bytes < 1.3 * sum(SIZES)


def test_a_spilled_snapshot_is_sent(source: Path, target: Path, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    take(source, JOB, 4, [storages(1)], spill=spill)
    assert len(RamDisk(source, spill_directory=spill).spill()) == 1
    with pytest.raises(UsageError, match="nobody has"):
        a_sender(source)
    sender, held = a_sender(source, spill)
    transfer(sender, held, a_receiver(target))
    assert found(target, JOB, 4) == storages(1)


def test_a_snapshot_that_is_spilled_while_it_is_sent_arrives(
    source: Path, target: Path, tmp_path: Path
) -> None:
    spill = tmp_path / "spill"
    take(source, JOB, 4, [storages(1)], spill=spill)
    sender, held = a_sender(source, spill)
    receiver = a_receiver(target)
    sending = portions(sender, receiver, 0)
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_receiver_that_died_is_followed_by_one_that_asks_for_the_rest(
    source: Path, target: Path, ranks: int
) -> None:
    contents = [storages(rank) for rank in range(ranks)]
    take(source, JOB, 7, contents)
    sender, held = a_sender(source)
    first = a_receiver(target)
    sent = sum(first.put(*one) for one in portions(sender, first, 0))
    if ranks > 1:
        sent += first.put(*next(portions(sender, first, 1)))
    first.abandon()  # as its death does: the kernel lets go of the locks, all else stays
    assert boundaries(target, JOB, ranks) == [set()] * ranks
    second = a_receiver(target)
    more = transfer(sender, held, second)
    assert [found(target, JOB, 7, rank) for rank in range(ranks)] == contents
    # Pieces that gather small storages have no file before all is there: those of two ranks may come again.
    again = sent + more - ranks * (9_000_000 + (1 << 20))
    assert 0 < again < ranks * 2 * 200_000
    assert more < ranks * sum(SIZES) - 4_000_000


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_damaged_after_it_had_arrived_is_sent_again(source: Path, target: Path, ranks: int) -> None:
    contents = [storages(rank) for rank in range(ranks)]
    take(source, JOB, 7, contents)
    sender, held = a_sender(source)
    first = a_receiver(target)
    first.put(*next(portions(sender, first, 0)))
    first.abandon()
    (store,) = target.glob("*.r0")
    piece = next(store.glob("A." + "[0-9a-f]" * 32), None)
    _flip(*((store / "A.gsnp", 1_000_000) if piece is None else (piece, 1_000)))
    assert transfer(sender, held, a_receiver(target)) >= ranks * sum(SIZES)
    assert [found(target, JOB, 7, rank) for rank in range(ranks)] == contents


def test_a_second_shipment_sends_nothing(source: Path, target: Path) -> None:
    take(source, JOB, 7, [storages(1)])
    for expected in (True, False):
        sender, held = a_sender(source)
        assert bool(transfer(sender, held, a_receiver(target))) is expected
    assert found(target, JOB, 7) == storages(1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_flipped_byte_on_the_way_is_noticed(source: Path, target: Path, ranks: int) -> None:
    take(source, JOB, 2, [storages(rank) for rank in range(ranks)])
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    sending = portions(sender, receiver, 0)
    receiver.put(*next(sending))
    header, data = next(sending)
    with pytest.raises(CorruptSnapshotError, match="is not what was sent"):
        receiver.put(header, flipped(data, len(data) - 1))
    with pytest.raises(RemoteProtocolError, match="not whole"):
        receiver.publish()
    receiver.abandon()
    assert boundaries(target, JOB, ranks) == [set()] * ranks
    transfer(sender, held, a_receiver(target))
    assert [found(target, JOB, 2, rank) for rank in range(ranks)] == [storages(r) for r in range(ranks)]


def test_a_byte_that_flips_in_the_target_is_noticed_before_anything_is_published(
    source: Path, target: Path
) -> None:
    take(source, JOB, 2, [storages(1)])
    sender, _ = a_sender(source)
    receiver = a_receiver(target)
    for one in portions(sender, receiver, 0):
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
    sender, _ = a_sender(source)
    receiver = a_receiver(target)
    sending = portions(sender, receiver, 0)
    receiver.put(*next(sending))
    _flip(source / f"{JOB}.r0" / "A.gsnp", 5_000_000)
    with pytest.raises(CorruptSnapshotError, match="changed since it was checked"):
        list(sending)
    sender, _ = a_sender(source)
    with pytest.raises(CorruptSnapshotError, match="storage 0"):
        sender.offer(0)


def test_a_snapshot_that_is_replaced_meanwhile_is_given_up_for_the_newer_one(
    source: Path, target: Path
) -> None:
    take(source, JOB, 1, [storages(1)])
    sender, _ = a_sender(source)
    receiver = a_receiver(target)
    sending = portions(sender, receiver, 0)
    receiver.put(*next(sending))
    take(source, JOB, 2, [storages(2)])
    receiver.put(*next(sending))  # the older one is whole still
    take(source, JOB, 3, [storages(3)])
    with pytest.raises(ReplacedSnapshotError, match="boundary 1"):
        list(sending)
    receiver.abandon()
    transfer(*a_sender(source), a_receiver(target))
    assert found(target, JOB, 3) == storages(3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_ram_disk_is_as_before(source: Path, target: Path, ranks: int) -> None:
    before = [storages(rank) for rank in range(ranks)]
    take(target, JOB, 1, before)
    take(source, JOB, 2, [storages(9 + rank) for rank in range(ranks)])
    sender, held = a_sender(source)
    limit = RamDisk(target).used_bytes + 8_000_000
    with pytest.raises(RamDiskFullError, match="is full"):
        transfer(sender, held, a_receiver(target, ramdisk_limit=str(limit)))
    assert boundaries(target, JOB, ranks) == [{1}] * ranks
    assert [found(target, JOB, 1, rank) for rank in range(ranks)] == before
    assert RamDisk(target).used_bytes <= limit - 8_000_000
    transfer(sender, held, a_receiver(target))  # nobody holds the stores


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


def test_no_rank_is_published_before_all_are_there(source: Path, target: Path) -> None:
    take(source, JOB, 3, [storages(rank) for rank in range(2)])
    sender, _ = a_sender(source)
    receiver = a_receiver(target)
    for one in portions(sender, receiver, 0):
        receiver.put(*one)
    with pytest.raises(RemoteProtocolError, match="not whole"):
        receiver.publish()
    assert boundaries(target, JOB, 2) == [set(), set()]


def test_older_snapshots_stay_until_every_rank_is_published(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(target, JOB, 1, [storages(rank) for rank in range(2)])
    take(source, JOB, 3, [storages(5 + rank) for rank in range(2)])
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    closed = []
    monkeypatch.setattr(JobStore, "close", lambda store, keep: closed.append(boundaries(target, JOB, 2)))
    transfer(sender, held, receiver)
    assert closed == [[{1, 3}, {1, 3}]] * 2


def test_a_job_that_has_come_further_is_not_set_back(source: Path, target: Path) -> None:
    take(source, JOB, 4, [storages(1)])
    take(target, JOB, 9, [storages(2)])
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    with pytest.raises(UsageError, match="boundary 9, further on than 4"):
        transfer(sender, held, receiver)
    receiver.abandon()
    assert found(target, JOB, 9) == storages(2)
    transfer(sender, held, Receiver({"ramdisk_dir": str(target)}, replace=True))
    assert boundaries(target, JOB) == [{4}]


def test_a_job_that_runs_at_the_target_is_let_be(source: Path, target: Path) -> None:
    take(source, JOB, 4, [storages(1)])
    sender, held = a_sender(source)
    with RamDisk(target).open_store(JOB), pytest.raises(UsageError, match="running already"):
        transfer(sender, held, a_receiver(target))


def test_of_a_gang_the_newest_snapshot_that_all_ranks_have_is_sent(source: Path, target: Path) -> None:
    contents = [storages(rank) for rank in range(2)]
    take(source, JOB, 3, contents)
    take(source, JOB, 4, contents[:1])  # the second rank was killed before it got there
    sender, held = a_sender(source)
    transfer(sender, held, a_receiver(target))
    assert (held.boundary, boundaries(target, JOB, 2)) == (3, [{3}, {3}])


def test_a_rank_without_a_snapshot_is_named(source: Path) -> None:
    take(source, JOB, 3, [storages(1)])
    with pytest.raises(UsageError, match="ranks 0 have a store"):
        Sender({"ramdisk_dir": str(source)}).begin(JOB, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda offer: msgspec.structs.replace(offer, head=flipped(offer.head, 100)),
        lambda offer: msgspec.structs.replace(offer, head=offer.head[:-1]),
        lambda offer: msgspec.structs.replace(offer, tail=flipped(offer.tail, 3)),
        lambda offer: msgspec.structs.replace(offer, tail=offer.tail[:-4096]),
        lambda offer: msgspec.structs.replace(offer, tail=offer.tail[1:]),
        lambda offer: msgspec.structs.replace(offer, keys=offer.keys[:-16]),
        lambda offer: msgspec.structs.replace(offer, rank=1),
        lambda offer: msgspec.structs.replace(offer, held=msgspec.structs.replace(offer.held, boundary=3)),
        lambda offer: msgspec.structs.replace(offer, held=msgspec.structs.replace(offer.held, job="other")),
    ],
)
def test_an_offer_that_is_no_snapshot_is_refused(source: Path, target: Path, change: object) -> None:
    take(source, JOB, 4, [storages(1)])
    sender, _ = a_sender(source)
    offer = decode(sender.offer(0), Offer)
    assert callable(change)
    with pytest.raises(SnapshotError):
        a_receiver(target).receive(encode(change(offer)))
    assert not target.exists()


def test_messages_that_are_none_are_refused(source: Path, target: Path) -> None:
    take(source, JOB, 4, [storages(1)])
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    for message in (b"", b"\xc1", encode(held), b"\x80\x04N."):
        with pytest.raises(RemoteProtocolError, match="no Offer"):
            receiver.receive(message)
    missing = decode(receiver.receive(sender.offer(0)), Missing)
    header = encode(Portion(0, missing.portions[0]))
    data = sender.portion(header)
    for wrong in (encode(Portion(1, (0,))), encode(Portion(0, (10_000,)))):
        with pytest.raises(RemoteProtocolError):
            receiver.put(wrong, data)
        with pytest.raises(RemoteProtocolError):
            sender.portion(wrong)
    with pytest.raises(RemoteProtocolError, match="another length"):
        receiver.put(header, data[:-1])
    receiver.put(header, data)
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        receiver.put(header, data)
    with pytest.raises(RemoteProtocolError, match="another one arrives"):
        receiver.receive(sender.offer(0))


def test_the_file_of_a_boundary_is_the_newest_one(source: Path) -> None:
    for seed in (1, 2):
        take(source, JOB, 5, [storages(seed)])
    assert list(restartable_files(source / f"{JOB}.r0")) == [5]
    assert found(source, JOB, 5) == storages(2)
