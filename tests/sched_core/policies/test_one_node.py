"""Jobs that need one node (``Job.within``): what policies that give devices do if no node has enough."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.placement.registry import PLACEMENTS, make_placement
from gpuslice.sched_core.policies.gandiva.servers import Servers
from gpuslice.sched_core.policies.optimus import Optimus
from gpuslice.sched_core.policies.ranked import choose_devices
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Changes, Decision, Migrate, Start, Suspend, View

from .worlds import Known, view


def job(name: str, number: int, least: int = 1, most: int = 2, *, on: tuple[int, ...] = ()) -> Job:
    """One that may be on both of two nodes, and runs if it is ``on`` devices."""
    made = Job(JobSpec(id=name, submit_s=0.0, devices=least, most_devices=most), number)
    made.within = (0, 1) if most > least else ()
    made.placement, made.running = on, bool(on)
    return made


class Planner:
    """Optimus on two nodes of two devices."""

    def __init__(self, *jobs: Job, interval_s: float = 100.0) -> None:
        self.policy = Optimus(interval_s=interval_s)
        self.jobs = {job.id: job for job in jobs}
        self.view = View(Cluster.parse("2x2"), self.jobs)

    def plan(self, now_s: float, *arrived: Job) -> list[Decision]:
        """What it decides; it is carried out."""
        self.view.now_s = now_s
        self.jobs.update({job.id: job for job in arrived})
        self.view.changes.arrived += arrived
        decisions = list(self.policy.plan(self.view).decisions)
        for decision in decisions:
            job = self.jobs[decision.job]
            job.running = not isinstance(decision, Suspend)
            if isinstance(decision, Start | Migrate):
                job.placement = decision.devices
        self.view.changes = Changes()
        return decisions


def test_it_gets_as_many_as_a_node_has() -> None:
    planner = Planner(job("x", 0, 1, 1, on=(0,)), job("e", 1, 1, 3))
    assert planner.plan(0.0) == [Start("e", (2, 3))]


def test_it_grows_on_its_own_node_and_leaves_that_for_no_larger_one() -> None:
    planner = Planner(job("x", 0, 1, 1, on=(0,)), job("e", 1, 1, 2, on=(1,)))
    assert planner.plan(0.0) == []
    del planner.jobs["x"]
    planner.view.changes = Changes(reset=True)
    assert planner.plan(100.0) == [Migrate("e", (0, 1))]


def test_who_finds_no_node_takes_nothing_from_others() -> None:
    """Two devices on two nodes are of no use to job e, so a and b keep them."""
    there = [job(name, number, 1, 1, on=(number,)) for number, name in enumerate("xayb")]
    planner = Planner(*there, job("e", 4, 2, 3))
    planner.policy.urgency = _first("e", "x", "y", "a", "b")  # type: ignore[method-assign]
    assert planner.plan(0.0) == []


def test_who_finds_no_node_keeps_nobody_waiting_between_intervals() -> None:
    planner = Planner(job("x", 0, 1, 1, on=(0,)), job("y", 1, 1, 1, on=(2,)))
    planner.policy.urgency = _first("x", "y", "e", "z")  # type: ignore[method-assign]
    planner.plan(0.0)
    assert planner.plan(1.0, job("e", 2, 2, 3)) == []
    assert planner.plan(2.0, job("z", 3, 1, 1)) in ([Start("z", (1,))], [Start("z", (3,))])


def test_it_chooses_before_those_that_can_be_on_two_nodes() -> None:
    planner = Planner(job("g", 0, 2, 2), job("e", 1, 1, 2, on=(1,)))
    assert planner.plan(0.0) == [Start("g", (2, 3)), Migrate("e", (0, 1))]


def _first(*names: str) -> Any:
    """Urgency in that order, and more devices last."""
    return lambda job, have, get, view: (float(bool(have)), float(names.index(job.id)))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_leaves_it_on_one_node(name: str) -> None:
    moment = view("3x4")
    free = moment.free()
    free.take((0, 1, 2, 4, 5, 6))
    free.take((8,))
    picky = job("e", 0, 2, 3)
    picky.within = (0, 1, 2)
    devices = choose_devices(make_placement(name), picky, free)
    assert devices is None or moment.cluster.nodes(devices) == {2}
    if name not in ("round-up", "topology"):
        assert devices is not None


def test_one_that_cannot_leave_its_node_finds_a_home_there_or_none() -> None:
    servers = Servers(Cluster.parse("2x2"), 1.0)
    picky = job("e", 0)
    picky.within = (1,)
    assert [server.node for server in servers.find(picky) or ()] == [1]
    for number in range(1, 3):
        other = job("x", number, 1, 1)
        other.id = f"x{number}"
        servers.settle(other, [servers.all[1]], 0.0)
    assert servers.find(picky) is None
    assert servers.roomy(picky, []) is None


@pytest.mark.parametrize("policy", ["drf", "optimus", "srtf", "themis", "gandiva"])
def test_no_policy_starts_it_on_a_node_that_it_may_not_be_on_any_more(policy: str) -> None:
    """It was to go there, and then it parked with a state that cannot leave its node."""
    picky = job("e", 0)
    picky.placement, picky.within = (2, 3), (0,)
    moment = View(Cluster.parse("2x2"), {"e": picky}, Known({"e": 100.0}))
    decisions = make_policy(policy, {}).plan(moment).decisions
    assert [isinstance(decision, Start) and decision.devices[0] in (0, 1) for decision in decisions] == [True]


def test_one_that_is_larger_than_what_is_left_of_the_nodes_waits() -> None:
    servers = Servers(Cluster([2, 1, 1]).without({0}), 4.0)
    assert servers.find(job("e", 0, 2, 3)) is None
    assert servers.find(job("x", 0, 2, 2)) is not None
