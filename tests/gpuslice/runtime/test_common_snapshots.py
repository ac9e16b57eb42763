"""Whenever a gang is killed, its ranks have snapshots of one boundary: the stores without a training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.format.tree import encode
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.gang_restart import keep_common, make_room, newest_common

RANKS, EVERY = 3, 2
JOB = "gang"
LAYOUT = Layout((StorageSpec(8, "cpu", "s"),))


class Rank:
    """A rank as far as its snapshots go: `checkpoint` and `suspend` are called at its boundaries."""

    def __init__(self, disk: RamDisk, number: int) -> None:
        self.boundary = 0
        self._disk = disk
        self._identity = RankIdentity(number, number, RANKS, RANKS)
        self.store = disk.open_store(JOB, number, ranks=range(RANKS))
        self._writing: tuple[SnapshotWriter, int] | None = None

    def settle(self) -> None:
        """Publish the checkpoint that is being written."""
        if self._writing is not None:
            writer, boundary = self._writing
            writer.publish(encode({}), [], boundary=boundary, restartable=True)
            self._writing = None

    def checkpoint(self) -> None:
        """Begin one."""
        self.settle()
        if make_room(self._disk, self.store, self._identity):
            self._writing = self.store.begin(LAYOUT, share=True, boundary=self.boundary), self.boundary

    def begin_suspend(self) -> None:
        """Up to where its snapshot would be published."""
        self.settle()
        keep_common(self._disk, self.store, self._identity)
        self._writing = self.store.begin(LAYOUT, share=True), self.boundary


class Gang:
    """Ranks in lockstep: none is more than one boundary ahead of another."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.disk = RamDisk(directory)
        self.ranks = [Rank(self.disk, number) for number in range(RANKS)]
        self.random = random.Random(seed)
        self.best = -1

    def check(self) -> None:
        """It could be killed now: the boundary from which it would go on never becomes an older one."""
        common = newest_common(self.disk.boundaries(JOB, rank) for rank in range(RANKS))
        assert (-1 if common is None else common) >= self.best
        self.best = -1 if common is None else common

    def go_on(self) -> None:
        """Some rank does what is next."""
        rank = self.random.choice(self.ranks)
        if self.random.random() < 0.4:
            rank.settle()
        elif rank.boundary == min(rank.boundary for rank in self.ranks):
            rank.boundary += 1
            if rank.boundary % EVERY == 0:
                rank.checkpoint()
        self.check()

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


@pytest.fixture
def gangs(shm: Path) -> Iterator[list[Gang]]:
    made: list[Gang] = []
    yield made
    for gang in made:
        for rank in gang.ranks:
            rank.store.close(keep=False)


@pytest.mark.parametrize("seed", range(10))
def test_there_is_always_one_from_which_all_can_go_on(shm: Path, gangs: list[Gang], seed: int) -> None:
    gang = Gang(shm, seed)
    gangs.append(gang)
    for step in range(400):
        gang.go_on()
        if step % 100 == 99:
            gang.suspend()


@pytest.mark.parametrize("seed", range(10))
def test_ranks_that_came_apart_come_together_again(shm: Path, gangs: list[Gang], seed: int) -> None:
    gang = Gang(shm, seed)
    gangs.append(gang)
    for _ in range(150):
        gang.go_on()
    # Quiet from now on: whoever begins a checkpoint has it at the next boundary.
    boundary = max(rank.boundary for rank in gang.ranks)
    for at in range(boundary + 1, boundary + 4 * EVERY):
        for rank in gang.ranks:
            rank.boundary = at
            rank.settle()
            if at % EVERY == 0:
                rank.checkpoint()
            gang.check()
    assert gang.best >= boundary + EVERY


def test_a_checkpoint_that_another_rank_writes_is_awaited(shm: Path, gangs: list[Gang]) -> None:
    gang = Gang(shm)
    gangs.append(gang)
    ahead, late = gang.ranks[0], gang.ranks[1]
    for boundary in (2, 4):
        for rank in gang.ranks:
            rank.settle()
        for rank in gang.ranks:
            rank.boundary = boundary
            rank.checkpoint()
    for rank in gang.ranks:
        if rank is not late:
            rank.settle()
    ahead.boundary = 6
    ahead.checkpoint()
    assert gang.disk.boundaries(JOB, 0) == {2, 4}, "the late one has yet to get 4"
    late.settle()
    ahead.checkpoint()
    ahead.settle()
    assert gang.disk.boundaries(JOB, 0) == {4, 6}
