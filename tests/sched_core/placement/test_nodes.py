"""Placements, each on a small cluster by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import Cluster, FreeDevices
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.placement.nodes import fewest_nodes
from gpuslice.sched_core.placement.registry import PLACEMENTS, make_placement


def place(
    name: str, demand: int, taken: list[int], cluster: str = "3x4", **spec: object
) -> tuple[int, ...] | None:
    free = FreeDevices(Cluster.parse(cluster))
    free.take(taken)
    job = Job(JobSpec(id="j", submit_s=0.0, devices=demand, **spec), 0)
    return make_placement(name).choose(job, free)


def test_count_takes_the_fullest_nodes_first() -> None:
    assert place("count", 3, [0, 4, 5, 6]) == (7, 1, 2)
    assert place("count", 9, [0, 4, 5, 6]) is None


@pytest.mark.parametrize(
    ("demand", "taken", "devices"),
    [
        (2, [0, 4, 5], (6, 7)),  # the fullest node that will do
        (4, [0, 4], (8, 9, 10, 11)),
        (4, [0, 4, 8], None),
        (6, [0], (4, 5, 6, 7, 1, 2)),  # a whole node and the rest elsewhere
        (6, [0, 1, 2, 8], (4, 5, 6, 7, 9, 10)),
        (8, [0, 4], None),
        (12, [], tuple(range(12))),
    ],
)
def test_consolidated(demand: int, taken: list[int], devices: tuple[int, ...] | None) -> None:
    assert place("consolidated", demand, taken) == devices
    assert place("yarn", demand, taken) == devices


def test_the_published_scheme_takes_the_first_node() -> None:
    assert place("published-yarn", 2, [0, 4, 5]) == (1, 2)
    assert place("published-yarn", 6, []) == (0, 1, 2, 3, 4, 5)
    assert place("published-yarn", 6, [8]) == (0, 1, 2, 3, 4, 5)
    assert place("published-yarn", 5, [0, 4]) == (8, 9, 10, 11, 1)


def test_spread_takes_one_per_node() -> None:
    assert place("spread", 3, []) == (0, 4, 8)
    assert place("spread", 4, [0, 1]) == (4, 8, 2, 5)


def test_random_is_seeded() -> None:
    draws = {place("random", 4, []) for _ in range(3)}
    assert len(draws) == 1
    other = make_placement("random", {"seed": "7"})
    assert (
        other.choose(Job(JobSpec(id="j", submit_s=0.0, devices=4), 0), FreeDevices(Cluster.parse("3x4")))
        not in draws
    )


def test_skew_decides_on_consolidation() -> None:
    taken = [0, 4, 8]  # three free on each node
    assert place("skew", 4, taken, skew=0.7) is None
    assert place("skew", 4, taken, skew=0.01) == (1, 2, 3, 5)
    assert place("skew", 4, taken, model="vgg16") is None
    assert place("skew", 4, taken, model="resnet50") == (1, 2, 3, 5)
    assert place("skew", 4, taken, model="vgg16", skew=0.01) == (1, 2, 3, 5)


def test_round_up_starts_in_aligned_blocks() -> None:
    assert place("round-up", 2, [0], "1x8") == (2, 3)
    assert place("round-up", 3, [0], "1x8") == (4, 5, 6)
    assert place("round-up", 3, [0, 4], "1x8") is None
    assert place("round-up", 5, [0], "2x8") == (8, 9, 10, 11, 12)
    assert place("round-up", 1, [0], "1x8") == (1,)
    assert place("round-up", 10, [0], "3x8") == tuple(range(8, 18))
    assert place("round-up", 10, [0, 8], "3x8") is None, "10 are two whole nodes"
    assert place("consolidated", 10, [0, 8], "3x8") == (*range(16, 24), 1, 2)


def test_topology_takes_the_closest_level() -> None:
    assert place("topology", 2, [0, 4], "1x8") == (2, 3)
    assert place("topology", 2, [0, 2, 4, 6], "1x8") == (1, 3)  # no pair is free, a four is
    assert place("topology", 4, [0], "1x8") == (4, 5, 6, 7)
    assert place("topology", 5, [0], "2x8") == (1, 2, 3, 4, 5)
    assert place("topology", 8, [0, 8], "2x8") == (1, 2, 3, 4, 5, 6, 7, 9)
    strict = make_placement("topology", {"relax": "false"})
    free = FreeDevices(Cluster.parse("2x8"))
    free.take([0, 8])
    assert strict.choose(Job(JobSpec(id="j", submit_s=0.0, devices=8), 0), free) is None
    with pytest.raises(ConfigError, match="do not divide"):
        make_placement("topology", {"levels": "2,3"})


@pytest.mark.parametrize("name", PLACEMENTS)
@given(taken=st.sets(st.integers(0, 19)), demand=st.integers(1, 20))
def test_only_free_devices_and_as_many_as_asked(name: str, taken: set[int], demand: int) -> None:
    devices = place(name, demand, sorted(taken), "2x8+1x4")
    if devices is not None:
        assert len(devices) == len(set(devices)) == demand
        assert not taken & set(devices)
    elif name in ("count", "spread", "random", "topology"):
        assert demand > 20 - len(taken)


def test_nodes_of_several_sizes_hold_large_jobs_on_the_fewest() -> None:
    cluster = Cluster.parse("2x3+1x4")
    consolidated = make_placement("consolidated")
    asked = Job(JobSpec(id="j", submit_s=0, devices=8), 0)
    devices = consolidated.choose(asked, FreeDevices(cluster))
    assert devices is not None
    assert len(devices) == 8
    assert cluster.nodes(devices) == {0, 1, 2}
    small = Job(JobSpec(id="j", submit_s=0, devices=4), 0)
    assert consolidated.choose(small, FreeDevices(cluster)) == (6, 7, 8, 9)
    assert consolidated.choose(small, FreeDevices(cluster, [0, 1, 3, 4])) is None, "one node would do"


@given(st.sets(st.integers(0, 17)), st.integers(1, 18))
def test_the_fewest_nodes_are_those_with_most_room_and_then_the_tightest(
    taken: set[int], demand: int
) -> None:
    free = FreeDevices(Cluster.parse("2x4+2x3+2x2"))
    free.take(sorted(taken))
    counts = {node: len(devices) for node, devices in enumerate(free.on_node) if devices}
    expected: list[int] = []
    while sum(counts.values()) and len(expected) < demand:
        rest = demand - len(expected)
        node = min(counts, key=lambda node: (counts[node] < rest, abs(counts[node] - rest), node))
        expected += free.on_node[node][:rest]
        del counts[node]
    assert fewest_nodes(demand, free) == (tuple(expected) if len(expected) == demand else None)
