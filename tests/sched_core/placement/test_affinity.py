"""Placement by classes of job size, by hand."""

from __future__ import annotations

from gpuslice.sched_core.cluster import Cluster, FreeDevices
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.placement.affinity import Affinity
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.traces.trace import Trace


def job(name: str, demand: int) -> Job:
    return Job(JobSpec(id=name, submit_s=0, devices=demand), 0)


class World:
    def __init__(self, cluster: str) -> None:
        self.free = FreeDevices(Cluster.parse(cluster))
        self.placement = Affinity()

    def start(self, name: str, demand: int) -> tuple[int, ...] | None:
        asked = job(name, demand)
        devices = self.placement.choose(asked, self.free)
        if devices is not None:
            self.free.take(devices)
            self.placement.placed(asked, devices)
        return devices


def test_sizes_keep_to_themselves_while_there_are_empty_nodes() -> None:
    world = World("3x4")
    assert world.start("a", 1) == (0,)
    assert world.start("b", 2) == (4, 5)
    assert world.start("c", 1) == (1,)
    assert world.start("d", 2) == (6, 7)
    assert world.start("e", 1) == (2,)


def test_without_an_empty_node_any_that_fits() -> None:
    world = World("2x4")
    assert world.start("a", 1) == (0,)
    assert world.start("b", 2) == (4, 5)
    assert world.start("c", 3) == (1, 2, 3)
    assert world.start("d", 3) is None


def test_the_least_loaded_of_the_class() -> None:
    world = World("2x4")
    first, second = world.start("a", 3), world.start("b", 3)
    assert (first, second) == ((0, 1, 2), (4, 5, 6))
    world.free.give((4, 5, 6))
    assert world.start("c", 1) == (4,), "an empty node comes before another class"
    assert world.start("d", 4) is None
    assert world.start("e", 1) == (5,)


def test_an_emptied_node_changes_its_class() -> None:
    world = World("2x4")
    assert world.start("a", 1) == (0,)
    assert world.start("b", 2) == (4, 5)
    world.free.give((0,))
    assert world.start("c", 2) == (6, 7)
    assert world.start("d", 2) == (0, 1)
    assert world.start("e", 1) == (2,), "no node is of its class or empty"


def test_what_was_only_tried_leaves_no_trace() -> None:
    """A policy may ask for places that it does not take."""
    world = World("2x4")
    assert world.placement.choose(job("tried", 2), world.free) == (0, 1)
    assert world.start("a", 1) == (0,)
    assert world.start("b", 2) == (4, 5)


def test_large_jobs_get_whole_nodes_and_a_rest() -> None:
    world = World("3x4")
    assert world.start("a", 6) == (0, 1, 2, 3, 4, 5)
    assert world.start("b", 6) == (8, 9, 10, 11, 6, 7)
    assert world.start("c", 1) is None


def test_in_a_simulation_small_jobs_leave_nodes_whole() -> None:
    trace = Trace([str(i) for i in range(5)], [0, 1, 2, 3, 4], [1, 1, 1, 1, 4], [100] * 5)
    outcome = Simulation(trace, Cluster([4, 4]), make_policy("fjf", placement=Affinity())).run()
    assert outcome.first_start_s.tolist() == [0, 1, 2, 3, 4]


def test_a_choice_that_another_job_of_its_kind_gets_counts_too() -> None:
    """``drf`` asks once for all jobs of a kind; the tenant with the least then has what was chosen."""
    trace = Trace([str(i) for i in range(3)], [0, 0, 1], [2, 2, 2], [100] * 3, {"tenant": ["b", "a", "c"]})
    outcome = Simulation(
        trace, Cluster([4, 4]), make_policy("drf", placement=Affinity()), keep_spans=True
    ).run()
    nodes = [{device // 4 for device in span.devices} for span in outcome.spans]
    assert nodes == [{0}, {0}, {1}]
