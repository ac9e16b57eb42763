"""Whenever a gang is killed, its ranks have snapshots of one boundary: the stores without a training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist

from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.format.tree import encode
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.runtime import common_snapshots
from gpuslice.runtime.common_snapshots import Announcements, CommonSnapshots, newest_common
from gpuslice.runtime.shared_value import SharedValue

RANKS, EVERY = 3, 2
JOB = "gang"
LAYOUT = Layout((StorageSpec(8, "cpu", "s"),))


class GroupStore:
    """The store of the process group. Others act while a rank asks it, and it fails, if that is wanted."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        #: Called before and after each change, in the midst of what some rank does.
        self.amid: Callable[[], object] = lambda: None
        #: Whether a change fails: before it is made, or after that, as its answer is lost.
        self.fails: Callable[[], str] = lambda: ""

    def renew(self) -> None:
        """There is another one, as if the group were destroyed and made anew."""
        self._store = dist.HashStore()

    def known(self) -> dict[int, tuple[int, ...]]:
        """What each rank has, as far as it has said so."""
        gang = msgspec.json.decode(self._store.get("gpuslice/snapshots"), type=Announcements)
        return {rank: one.has for rank, one in gang.items()}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.amid()
        how = self.fails()
        if how == "before":
            raise dist.DistNetworkError("Broken pipe")
        answer = self._store.compare_set(key, expected, desired)
        self.amid()
        if how == "after":
            raise dist.DistNetworkError("Failed to recv, got 0 bytes")
        return answer


class Rank:
    """A rank as far as its snapshots go: `checkpoint` and `suspend` are called at its boundaries."""

    def __init__(self, disk: RamDisk, number: int, group: GroupStore) -> None:
        self.boundary = 0
        self.busy = False
        self.store = disk.open_store(JOB, number, ranks=range(RANKS))
        value = SharedValue(lambda: group)  # type: ignore[arg-type, return-value]
        nothing = [set[int]() for _ in range(RANKS)]
        self.common = CommonSnapshots(self.store, number, nothing, lambda listen: None, value)
        self._writing: tuple[SnapshotWriter, int] | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.busy = True
        yield
        self.busy = False

    def settle(self) -> None:
        """Publish the checkpoint that is being written."""
        if self._writing is not None:
            writer, boundary = self._writing
            writer.publish(encode({}), [], boundary=boundary, restartable=True)
            self._writing = None

    def give_up(self) -> None:
        if self._writing is not None:
            self._writing[0].abort()
            self._writing = None

    def checkpoint(self) -> None:
        """Begin one."""
        self.settle()
        if self.common.make_room(self.boundary):
            self._writing = self.store.begin(LAYOUT, share=True), self.boundary

    def begin_suspend(self) -> None:
        """Up to where its snapshot would be published."""
        self.settle()
        self.common.keep()
        self._writing = self.store.begin(LAYOUT, share=True), self.boundary


class Gang:
    """Ranks of which none is more than ``lead`` boundaries ahead of another."""

    def __init__(self, disks: list[RamDisk]) -> None:
        self.disks = disks
        self.group = GroupStore()
        self.ranks = [Rank(disk, number, self.group) for number, disk in enumerate(disks)]
        self.random = random.Random()
        self.lead = 1
        self.best = -1

    def draw(self, seed: int) -> None:
        """In every other gang the ranks have loaders of their own, and do not wait for each other."""
        self.random.seed(seed)
        self.lead = 5 if seed % 2 else 1

    def boundaries(self, rank: int) -> set[int]:
        return self.disks[rank].boundaries(JOB, rank)

    def check(self) -> None:
        """It could be killed now: the boundary from which it would go on never becomes an older one."""
        common = newest_common(map(self.boundaries, range(RANKS)))
        assert (-1 if common is None else common) >= self.best
        self.best = -1 if common is None else common

    def go_on(self) -> None:
        """Some rank, of those that do nothing, does what is next."""
        rank = self.random.choice([rank for rank in self.ranks if not rank.busy])
        with rank.at_work():
            draw = self.random.random()
            if draw < 0.03:
                rank.give_up()
            elif draw < 0.4:
                rank.settle()
            elif rank.boundary < min(rank.boundary for rank in self.ranks) + self.lead:
                rank.boundary += 1
                rank.common.listen()
                if rank.boundary % EVERY == 0:
                    rank.checkpoint()
        self.check()

    def race(self) -> None:
        """From now on other ranks act while one decides: it loses races, and could be killed amid each."""

        def amid() -> None:
            self.check()
            if sum(rank.busy for rank in self.ranks) == 1 and self.random.random() < 0.5:
                self.go_on()

        self.group.amid = amid

    def suspend(self) -> None:
        """At one boundary, in any order."""
        boundary = max(rank.boundary for rank in self.ranks) + 1
        order = self.random.sample(self.ranks, RANKS)
        for rank in order:
            rank.boundary = boundary
            rank.begin_suspend()
            self.check()
            if self.random.random() < 0.5:
                rank.settle()
                self.check()
        for rank in order:
            rank.settle()
            self.check()
        assert self.best == boundary

    def quiet(self) -> None:
        """Whoever begins a checkpoint has it at the next boundary."""
        first = max(rank.boundary for rank in self.ranks) + 1
        for at in range(first, first + 4 * EVERY):
            for rank in self.ranks:
                rank.boundary = at
                rank.settle()
                if at % EVERY == 0:
                    rank.checkpoint()
                self.check()
        assert self.best >= first + EVERY


@pytest.fixture(params=["one node", "three nodes"])
def gang(shm: Path, request: pytest.FixtureRequest) -> Iterator[Gang]:
    apart = request.param == "three nodes"
    if apart:
        for number in range(RANKS):
            (shm / str(number)).mkdir(mode=0o700)
    made = Gang([RamDisk(shm / str(number) if apart else shm) for number in range(RANKS)])
    yield made
    made.group.amid = lambda: None
    for rank in made.ranks:
        rank.store.close(keep=False)


@pytest.mark.parametrize("seed", [1])
def test_there_is_always_one_from_which_all_can_go_on(gang: Gang, seed: int) -> None:
    gang.draw(seed)
    for step in range(200):
        gang.race()
        gang.go_on()
        if step % 50 == 49:
            gang.group.amid = gang.check
            gang.suspend()


@pytest.mark.parametrize("seed", [1])
def test_so_there_is_while_the_store_fails_and_ranks_come_together_again(gang: Gang, seed: int) -> None:
    """Nothing is lost by a failure while they train."""
    gang.draw(seed)
    gang.race()
    gang.group.fails = lambda: gang.random.choice(["", "", "before", "after"])
    for _ in range(100):
        gang.go_on()
    gang.group.amid, gang.group.fails = gang.check, lambda: ""
    gang.quiet()


@pytest.mark.parametrize("seed", [1])
def test_ranks_that_came_apart_come_together_again(gang: Gang, seed: int) -> None:
    gang.draw(seed)
    gang.race()
    for _ in range(100):
        gang.go_on()
    gang.group.amid = gang.check
    gang.quiet()


def together(gang: Gang, *boundaries: int) -> None:
    """All have checkpoints of these."""
    for boundary in boundaries:
        for rank in gang.ranks:
            rank.boundary = boundary
            rank.checkpoint()
        for rank in gang.ranks:
            rank.settle()
        for rank in gang.ranks:
            assert rank.common.listen()


def test_a_checkpoint_that_another_rank_writes_is_awaited(gang: Gang) -> None:
    together(gang, 2)
    ahead, late = gang.ranks[0], gang.ranks[1]
    for rank in gang.ranks:
        rank.boundary = 4
        rank.checkpoint()
    for rank in gang.ranks:
        if rank is not late:
            rank.settle()
    ahead.boundary = 6
    ahead.checkpoint()
    assert gang.boundaries(0) == {2, 4}, "the late one has yet to get 4"
    late.settle()
    ahead.checkpoint()
    ahead.settle()
    assert gang.boundaries(0) == {4, 6}


def test_a_rank_that_gives_up_its_checkpoint_is_not_awaited(gang: Gang) -> None:
    together(gang, 2)
    gang.ranks[1].boundary = 4
    gang.ranks[1].checkpoint()
    gang.ranks[1].give_up()
    for rank in (gang.ranks[0], gang.ranks[2]):
        rank.boundary = 4
        rank.checkpoint()
        rank.settle()
    gang.ranks[0].boundary = 6
    gang.ranks[0].checkpoint()
    assert gang.boundaries(0) == {2}, "all have 2 alone, and it writes 6"


def test_without_the_store_there_is_no_checkpoint_and_a_suspend_keeps_what_all_had(
    gang: Gang, capsys: pytest.CaptureFixture[str]
) -> None:
    together(gang, 2, 4)
    ahead = gang.ranks[0]
    ahead.boundary = 6
    ahead.checkpoint()
    ahead.settle()
    gang.group.fails = lambda: "before"
    for boundary in (8, 9):
        ahead.boundary = boundary
        ahead.checkpoint()
    assert gang.boundaries(0) == {4, 6}
    assert capsys.readouterr().err == (
        "gpuslice: no checkpoints: the store of the process group is not available: Broken pipe\n"
    )
    for rank in gang.ranks:
        rank.boundary = 10
        rank.begin_suspend()
        gang.check()
    assert gang.best == 4
    for rank in gang.ranks:
        rank.settle()
        gang.check()
    assert gang.best == 10
    gang.group.fails = lambda: ""
    for rank in gang.ranks:
        rank.common.listen()
    together(gang, 12)
    assert gang.boundaries(0) == {10, 12}


def test_in_a_process_group_made_anew_nobody_is_believed_to_have_nothing(gang: Gang) -> None:
    together(gang, 2, 4)
    gang.group.renew()
    gang.ranks[2].common.announce()
    assert gang.group.known() == {2: (2, 4)}
    for rank in gang.ranks:
        rank.boundary = 6
        rank.checkpoint()
    for rank in gang.ranks:
        rank.settle()
    assert list(map(gang.boundaries, range(RANKS))) == [{2, 4}, {4, 6}, {4, 6}], "the first knows not all"
    together(gang, 7, 8)
    assert list(map(gang.boundaries, range(RANKS))) == [{7, 8}] * RANKS


@pytest.mark.parametrize(
    ("kinds", "device"), [(("cpu",), "cpu"), (("cpu", "cuda"), "cpu"), (("cuda",), "cuda:3")]
)
def test_ranks_agree_by_tensors_that_their_group_takes(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], device: str
) -> None:
    """Whatever its backend is called: ``nccl``, ``cuda:nccl``, or both by their device."""
    group = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_group", lambda: group)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert common_snapshots._device_of_collectives() == torch.device(device)


def test_a_rank_whose_training_has_ended_has_nothing_any_more(gang: Gang) -> None:
    together(gang, 2, 4)
    ended = gang.ranks[1]
    ended.common.withdraw()
    assert gang.group.known()[1] == ()
    ended.store.forget_after(-1)
    assert gang.boundaries(1) == set()
    late = gang.ranks[0]
    late.boundary = 6
    late.checkpoint()
    late.settle()
    assert newest_common(map(gang.boundaries, range(RANKS))) is None, "all of them begin anew"
