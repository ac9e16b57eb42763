"""Placement by local search, against every possible choice on small clusters."""

from __future__ import annotations

import random
from itertools import product

from gpuslice.sched_core.cluster import Cluster, FreeDevices
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.placement.search import LocalSearch


def job(demand: int) -> Job:
    return Job(JobSpec(id="a", submit_s=0, devices=demand), 0)


def cost(parts: tuple[int, ...], room: list[int], size: int) -> tuple[int, int, int]:
    used = [(part, free) for part, free in zip(parts, room, strict=True) if part]
    return (
        len(used),
        sum(free == size and part < free for part, free in used),
        sum(part < free for part, free in used),
    )


def test_one_node_and_the_tightest() -> None:
    free = FreeDevices(Cluster([4, 4, 4]), [0, 1, 2, 3, 4, 5, 6, 8, 9])
    assert LocalSearch().choose(job(2), free) == (8, 9)
    assert LocalSearch().choose(job(4), free) == (0, 1, 2, 3)
    assert LocalSearch().choose(job(9), free) == (0, 1, 2, 3, 4, 5, 6, 8, 9)
    assert LocalSearch().choose(job(10), free) is None


def test_two_parts_fill_two_nodes_rather_than_break_a_whole_one() -> None:
    """Greedy takes the whole node and one device of another; 3 + 2 leaves the whole one alone."""
    free = FreeDevices(Cluster([4, 4, 4]), [0, 1, 2, 3, 4, 5, 6, 8, 9])
    assert LocalSearch().choose(job(5), free) == (4, 5, 6, 8, 9)


def test_never_more_nodes_than_needed_and_mostly_the_best() -> None:
    draw = random.Random(0)
    best = 0
    for _ in range(200):
        room = [draw.randrange(0, 5) for _ in range(4)]
        if not sum(room):
            best += 1
            continue
        demand = draw.randrange(1, sum(room) + 1)
        free = FreeDevices(Cluster([4] * 4), [4 * node + i for node in range(4) for i in range(room[node])])
        devices = LocalSearch().choose(job(demand), free)
        assert devices is not None
        assert len(set(devices)) == demand
        assert free.has(devices)
        found = tuple(sum(device // 4 == node for device in devices) for node in range(4))
        ways = product(*(range(count + 1) for count in room))
        optimum = min(cost(way, room, 4) for way in ways if sum(way) == demand)
        assert cost(found, room, 4)[0] == optimum[0]
        best += cost(found, room, 4) == optimum
    assert best >= 190
