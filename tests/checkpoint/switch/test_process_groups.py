"""Process groups of a parked rank: what the ranks agree on, and timeouts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpuslice.checkpoint.switch.process_groups import EXTENSION, VETO, ParkedGroups, agree
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.errors import RamDiskFullError
from gpuslice.kernels import open_device
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.types import DeviceName

from ...patience import PATIENCE_S

RANKS = 3
LONG, NONE = timedelta(seconds=PATIENCE_S), timedelta(milliseconds=1)
TIMEOUT = timedelta(seconds=77)
CPU = open_device(DeviceName("cpu", None))


def asked(store: dist.Store, ranks: int, patience: timedelta) -> list[bool]:
    """The answers that so many ranks get who ask at the same time."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda _: agree(store, "here", RANKS, patience), range(ranks)))


def test_all_ranks_agree() -> None:
    assert asked(dist.HashStore(), RANKS, LONG) == [True] * RANKS


def test_without_one_rank_nobody_does_and_it_comes_too_late() -> None:
    store = dist.HashStore()
    assert asked(store, RANKS - 1, NONE) == [False] * (RANKS - 1)
    assert not agree(store, "here", RANKS, LONG)


def test_a_rank_that_cannot_says_so_and_nobody_waits_for_it() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agree, store, "here", RANKS, LONG)
        assert not agree(store, "here", VETO, NONE)
        assert not waiting.result(PATIENCE_S)


@pytest.fixture
def counter() -> BoundaryCounter:
    return BoundaryCounter()


@pytest.fixture
def group(counter: BoundaryCounter) -> Iterator[Any]:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    dist.destroy_process_group()


def park(groups: ParkedGroups) -> None:
    with groups.parking(1, CPU) as release:
        release(SwitchRecord(1))


def test_a_timeout_is_extended_until_a_collective_has_been_completed(
    counter: BoundaryCounter, group: Any
) -> None:
    groups = ParkedGroups(counter.call_at_next)
    dist.barrier()
    park(groups)
    assert group.options._timeout == TIMEOUT + EXTENSION
    groups.restore(CPU, moves=False)
    groups.back()
    for _ in range(2):
        counter.fetching()
        assert group.options._timeout == TIMEOUT + EXTENSION, "the other ranks may be parked still"
    dist.barrier()
    counter.fetching()
    assert group.options._timeout == TIMEOUT


def test_a_second_park_before_that_extends_it_no_further(counter: BoundaryCounter, group: Any) -> None:
    groups = ParkedGroups(counter.call_at_next)
    for _ in range(2):
        park(groups)
        groups.back()
        assert group.options._timeout == TIMEOUT + EXTENSION
    dist.barrier()
    counter.fetching()
    assert group.options._timeout == TIMEOUT


def test_a_suspend_that_fails_extends_it_for_the_others_that_may_be_parked(
    counter: BoundaryCounter, group: Any
) -> None:
    groups = ParkedGroups(counter.call_at_next)
    with pytest.raises(RamDiskFullError), groups.parking(1, CPU):
        raise RamDiskFullError("full")
    assert group.options._timeout == TIMEOUT + EXTENSION
    dist.barrier()
    counter.fetching()
    assert group.options._timeout == TIMEOUT


def test_without_a_process_group_nothing_happens(counter: BoundaryCounter) -> None:
    groups = ParkedGroups(counter.call_at_next)
    record = SwitchRecord(1)
    with groups.parking(1, CPU) as release:
        release(record)
    groups.restore(CPU, moves=True)
    groups.back()
    assert (record.bytes_communicators, record.held, groups.obstacle_to_moves(CPU)) == (0, {}, "")
