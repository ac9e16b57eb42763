"""Sizes and places."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.sched_core.cluster import Cluster, FreeDevices
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.policies.chronus.allocate import Request, local_search, place_blocks, round_up


def jobs(*demands: int) -> list[Job]:
    return [Job(JobSpec(id=f"j{i}", submit_s=0.0, devices=d), i) for i, d in enumerate(demands)]


@pytest.mark.parametrize(
    ("asked", "block"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (7, 8), (8, 8), (10, 16), (16, 16), (17, 24)]
)
def test_sizes_on_nodes_of_eight(asked: int, block: int) -> None:
    assert round_up(asked, 8) == block


def test_only_the_rest_may_be_rounded_up() -> None:
    assert round_up(10, 8, split=True) == 10
    assert round_up(11, 8, split=True) == 12
    assert round_up(5, 6) == 6


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=1, max_size=12))
@settings(max_examples=80, deadline=None)
def test_friendly_sizes_never_fragment(demands: list[int]) -> None:
    """Whatever fits by number is placed on as few nodes as possible (the paper's proposition)."""
    chosen: list[Job] = []
    room = 32
    for job in jobs(*demands):
        if round_up(job.demand, 8) <= room:
            room -= round_up(job.demand, 8)
            chosen.append(job)
    cluster = Cluster.parse("4x8")
    free = FreeDevices(cluster)
    placed = place_blocks([Request(job, round_up(job.demand, 8)) for job in chosen], free)
    devices = [device for held in placed.values() for device in held]
    assert len(devices) == len(set(devices)) == sum(job.demand for job in chosen)
    assert free.total == 32 - len(devices)
    for job in chosen:
        assert len(cluster.nodes(placed[job.id])) == -(-job.demand // 8)


def test_jobs_stay_where_they_are_if_the_others_still_fit() -> None:
    first, second = jobs(2, 4)
    first.running, first.placement = True, (5, 6)
    free = FreeDevices(Cluster.parse("2x4"))
    assert place_blocks([Request(first, 2), Request(second, 4)], free) == {"j0": (5, 6), "j1": (0, 1, 2, 3)}


def test_jobs_move_if_the_others_would_not_fit() -> None:
    first, second, third = jobs(2, 2, 4)
    first.running, first.placement = True, (0, 1)
    second.running, second.placement = True, (4, 5)
    requests = [Request(job, job.demand) for job in (first, second, third)]
    placed = place_blocks(requests, FreeDevices(Cluster.parse("2x4")))
    assert placed["j2"] == (0, 1, 2, 3)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sets(st.integers(0, 15), max_size=8))
@settings(max_examples=80, deadline=None)
def test_local_search_gives_no_device_twice(demands: list[int], held: set[int]) -> None:
    free = FreeDevices(Cluster.parse("4x4"), (d for d in range(16) if d not in held))
    before = free.total
    placed = local_search(jobs(*demands), free)
    devices = [device for chosen in placed.values() for device in chosen]
    assert len(devices) == len(set(devices))
    assert not held & set(devices)
    assert free.total == before - len(devices)


def test_local_search_splits_no_job_where_it_need_not() -> None:
    # Nodes with 3 and 5 free. The 4 goes to the node of 5 with the 1, the 3 to the other.
    free = FreeDevices(Cluster.parse("1x3+1x5"))
    placed = local_search(jobs(3, 4, 1), free)
    assert all(len(free.cluster.nodes(devices)) == 1 for devices in placed.values())
