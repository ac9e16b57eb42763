"""Placement over racks, by hand."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.cluster import Cluster, FreeDevices
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.placement.registry import make_placement


def place(
    demand: int, taken: list[int], cluster: str = "3x2x4", *, relax: bool = True
) -> tuple[int, ...] | None:
    free = FreeDevices(Cluster.parse(cluster))
    free.take(taken)
    job = Job(JobSpec(id="j", submit_s=0.0, devices=demand), 0)
    return make_placement("racks", {"relax": relax}).choose(job, free)


@pytest.mark.parametrize(
    ("demand", "taken", "devices"),
    [
        (2, [0, 4, 5], (6, 7)),  # as consolidated
        (8, [0], tuple(range(8, 16))),  # one rack, not the first two idle nodes
        (6, [0, 8, 9], (4, 5, 6, 7, 1, 2)),  # the rack that has fewer idle nodes
        (6, [0, 1, 2], (8, 9, 10, 11, 12, 13)),  # no room for the rest beside its only idle node
        (8, [0, 8, 16], (4, 5, 6, 7, 12, 13, 14, 15)),  # no rack has room: as few as possible
        (12, [], (*range(8), *range(8, 12))),
        (12, [0, 4, 8, 16], None),
        (6, [0, 1, 2, 8, 9, 10, 16, 17, 18], (4, 5, 6, 7, 12, 13)),
    ],
)
def test_jobs_of_several_nodes_lie_in_one_rack(
    demand: int, taken: list[int], devices: tuple[int, ...] | None
) -> None:
    assert place(demand, taken) == devices


def test_without_relax_a_job_waits_for_a_rack_unless_none_could_hold_it() -> None:
    assert place(8, [0, 8, 16], relax=False) is None
    assert place(8, [0, 8], relax=False) == tuple(range(16, 24))
    assert place(12, [], relax=False) is not None


def test_one_rack_and_nodes_of_several_sizes_are_consolidated() -> None:
    assert place(6, [0], "3x4") == (4, 5, 6, 7, 1, 2)
    assert place(3, [], "1x1x4+1x1x2") == (0, 1, 2)
