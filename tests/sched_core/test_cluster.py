"""Clusters and free devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster, Extent, FreeDevices


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4x8", (8,) * 4),
        ("2x8+1x4", (8, 8, 4)),
        ("1x1", (1,)),
        ("3x2x4", (4,) * 6),
        ("2x8/2+1x4", (8, 8, 4)),
        ("2x2x8/2+1x1x4", (8, 8, 8, 8, 4)),
    ],
)
def test_parse_and_print(text: str, sizes: tuple[int, ...]) -> None:
    assert Cluster.parse(text).node_sizes == sizes
    assert str(Cluster.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "8", "4x", "4*8", "0x8", "4x0", "-1x8", "4x8+", "0x2x4", "2x2x2x2", "4x8/3", "4x8/0"]
)
def test_what_is_not_a_cluster(text: str) -> None:
    with pytest.raises(UsageError):
        Cluster.parse(text)


def test_devices_are_numbered_through() -> None:
    cluster = Cluster.parse("1x2+1x3")
    assert cluster.node_of == [0, 0, 1, 1, 1]
    assert [cluster.local_of(device) for device in range(5)] == [0, 1, 0, 1, 2]
    assert cluster.nodes((1, 4)) == {0, 1}


def test_racks_and_sockets() -> None:
    cluster = Cluster.parse("2x2x4/2+1x4")
    assert cluster.rack_sizes == (2, 2, 1)
    assert cluster.in_rack(1) == range(2, 4)
    assert cluster.socket_of[:6] == [0, 0, 1, 1, 2, 2]
    assert cluster.extent((0, 1)) == Extent(racks=1, nodes=1, sockets=1)
    assert cluster.extent((1, 2, 4)) == Extent(racks=1, nodes=2, sockets=3)
    assert cluster.extent((0, 8)) == Extent(racks=2, nodes=2, sockets=2)


@pytest.mark.parametrize(
    ("count", "least"), [(1, (1, 1, 1)), (4, (1, 1, 1)), (5, (1, 2, 2)), (8, (1, 2, 3)), (9, (2, 3, 4))]
)
def test_the_least_extent(count: int, least: tuple[int, int, int]) -> None:
    assert Cluster.parse("2x2x4/2+1x4").closest(count) == least


def test_what_cannot_be_had_keeps_its_number() -> None:
    whole = Cluster.parse("2x2x4/2")
    part = whole.without({1, 2})
    assert (part.rack_sizes, part.node_sizes, part.size) == ((2, 2), (4, 0, 0, 4), 8)
    assert part.socket_sizes == (2, 2, 0, 0, 0, 0, 2, 2)
    assert (list(part.on(2)), list(part.on(3)), part.node_of) == ([], [12, 13, 14, 15], whole.node_of)
    assert part.even
    assert part.closest(8) == Extent(racks=2, nodes=2, sockets=4)
    assert FreeDevices(part).on_node == [[0, 1, 2, 3], [], [], [12, 13, 14, 15]]
    assert FreeDevices(part).nodes_with == [[1, 2], [], [], [], [0, 3]]
    assert not FreeDevices(part).has((4,))
    assert str(whole.without({0, 1})) == "2x4/2"
    assert (whole.size, whole.node_sizes) == (16, (4,) * 4), "it has not changed"


def test_racks_that_are_not_those_of_the_nodes() -> None:
    with pytest.raises(UsageError, match="name every node"):
        Cluster([4, 4], [1])


@given(st.lists(st.sets(st.integers(0, 11)), max_size=8))
def test_taking_and_giving(takes: list[set[int]]) -> None:
    free = FreeDevices(Cluster.parse("3x4"))
    taken: set[int] = set()
    for devices in takes:
        back, new = sorted(devices & taken), sorted(devices - taken)
        before = free.copy()
        free.give(back)
        free.take(new)
        taken ^= devices
        left = set(range(12)) - taken
        assert free.total == len(left)
        assert [d for node in free.on_node for d in node] == sorted(left)
        assert {n for n in range(3) if len(free.on_node[n]) == 2} == set(free.nodes_with[2])
        assert free.has(left)
        assert not taken or not free.has(taken)
        assert before.total == 12 - len(taken ^ devices)
