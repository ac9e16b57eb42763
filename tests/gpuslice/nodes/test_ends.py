"""Sender and receiver: every byte arrives, and what is not whole never counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuslice.checkpoint.ramdisk.listing import restartable_files
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.slots import pieces_of
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import (
    RemoteProtocolError,
    SnapshotError,
    UsageError,
)
from gpuslice.nodes.messages import Missing, Offer, Portion, decode, encode
from gpuslice.nodes.receiver import Receiver
from gpuslice.nodes.sender import Sender

from .ends import JOB, a_receiver, a_sender, flipped, gangs, portions, transfer
from .synthetic import SIZES, Storages, boundaries, found, storages, take


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


def test_what_ranks_have_little_in_common_is_sent_once_and_kept_in_whole_files(
    source: Path, target: Path
) -> None:
    common = storages(1)
    ranks = [[storages(rank)[0], *common[1:]] for rank in range(4)]
    take(source, JOB, 1, ranks)
    sender, held = a_sender(source)
    sent = transfer(sender, held, a_receiver(target))
    assert 0 < sent - 4 * SIZES[0] < sum(SIZES[1:]) + 5 * (64 << 10)
    assert [found(target, JOB, 1, rank) for rank in range(4)] == ranks
    assert not any(pieces_of(target / f"{JOB}.r{rank}" / "A.gsnp") for rank in range(4))


def test_a_spilled_snapshot_is_sent(source: Path, target: Path, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    take(source, JOB, 4, [storages(1)], spill=spill)
    assert len(RamDisk(source, spill_directory=spill).spill()) == 1
    with pytest.raises(UsageError, match="no rank has"):
        a_sender(source)
    sender, held = a_sender(source, spill)
    transfer(sender, held, a_receiver(target))
    assert found(target, JOB, 4) == storages(1)


@gangs
def test_of_the_next_snapshot_only_what_has_changed_is_sent(
    source: Path, target: Path, contents: list[Storages]
) -> None:
    take(source, JOB, 7, contents)
    transfer(*a_sender(source), a_receiver(target))
    changed = [[*one[:2], flipped(one[2]), *one[3:]] for one in contents]
    take(source, JOB, 8, changed)
    assert transfer(*a_sender(source), a_receiver(target)) == len(contents) * (1 << 20)
    assert [found(target, JOB, 8, rank) for rank in range(len(contents))] == changed


def test_a_second_shipment_sends_nothing(source: Path, target: Path) -> None:
    take(source, JOB, 7, [storages(1)])
    for expected in (True, False):
        sender, held = a_sender(source)
        assert bool(transfer(sender, held, a_receiver(target))) is expected
    assert found(target, JOB, 7) == storages(1)


def test_no_rank_is_published_before_all_are_there(source: Path, target: Path) -> None:
    take(source, JOB, 3, [storages(rank) for rank in range(2)])
    sender, held = a_sender(source)
    receiver = a_receiver(target)
    for header, data in portions(sender, held, receiver):
        if decode(header, Portion).rank == 0:
            receiver.put(header, data)
    with pytest.raises(RemoteProtocolError, match="not whole"):
        receiver.publish()
    assert boundaries(target, JOB, 2) == [set(), set()]


def test_an_offer_of_some_ranks_only_is_refused(source: Path, target: Path) -> None:
    take(source, JOB, 3, [storages(rank) for rank in range(2)])
    sender, _ = a_sender(source)
    for ranks in ((), (0,), (1,)):
        with pytest.raises(RemoteProtocolError, match="all its ranks"):
            a_receiver(target).receive(*map(sender.offer, ranks))
    assert not target.exists()


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
    header = encode(missing.portions[0])
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
