"""What the simulator books: waiting by cause, devices in use, slices that are worth their switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policies.wrapper import Wrapper
from gpuslice.sched_core.policy import Migrate, Plan, Policy, Start, Suspend, View
from gpuslice.sched_core.sim.cost import MeasuredCost
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.metrics import summary
from gpuslice.sched_core.sim.model import FixedCost
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.run import Request, run_one
from gpuslice.sched_core.sim.speed import MeasuredSpeed, SpeedFile
from gpuslice.sched_core.traces.trace import Trace

from .test_engine import Scripted, trace_of


def test_slices_are_as_long_as_their_switches_are_worth() -> None:
    """Two jobs of an hour in slices of a minute, 62 s a switch: half of the time would be lost.

    A live scheduler lets switching take 3 %: slices of 2,067 s, rounded up to whole quanta.
    """
    request = Request(trace_of([(0, 1, 3600), (0, 1, 3600)]), "1x1", "las", cost="fixed:62s", engine="plain")
    outcome = run_one(request)
    assert max(outcome.finish_s) <= 7200 * 1.03
    assert outcome.preemptions.sum() <= 3
    careless = run_one(replace(request, switch_share=0.0))
    assert max(careless.finish_s) > 14_000


def test_the_dearest_unfinished_job_says_how_long_slices_are() -> None:
    trace = Trace(["0", "1", "2"], [0, 0, 50], [1, 1, 1], [100, 30, 10], {"model": ["a", "b", "a"]})
    cost = MeasuredCost(0.3, {"b": 0.6})
    policy = Recording(make_policy("fifo"))
    Simulation(trace, Cluster([1]), policy, cost=cost).run()
    assert policy.least_slices_s == [(0, 20), (50, 20), (100, 20), (130, 10)]


class Recording(Wrapper):
    """Notes how long slices had to be whenever the policy was asked."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.least_slices_s: list[tuple[float, float]] = []

    def plan(self, view: View) -> Plan:
        if view.jobs:
            self.least_slices_s.append((view.now_s, round(view.least_slice_s, 9)))
        return self.policy.plan(view)


def test_waiting_for_ones_share_is_no_fragmentation() -> None:
    """a may use two of four devices and does; its second job waits until 10 although two are free."""
    trace = Trace(["0", "1", "2"], [0, 0, 0], [2, 2, 2], [10, 10, 30], {"tenant": ["a", "a", "b"]})
    policy = make_policy("yarn-cs", {"capacities": "a:1,b:1", "elastic": "false"})
    found = Simulation(trace, Cluster([6]), policy).run()
    assert found.first_start_s.tolist() == [0, 10, 0]
    assert (found.fair_share_s.tolist(), found.fragmented_s.tolist()) == ([0, 10, 0], [0, 0, 0])


def test_waiting_for_other_jobs_is_neither_delay(simulate: Callable[..., Outcome]) -> None:
    outcome = simulate([(0, 2, 10), (4, 1, 6)], "1x2", "fifo")
    assert (outcome.fair_share_s.tolist(), outcome.fragmented_s.tolist()) == ([0, 0], [0, 0])


def test_a_packed_pair_uses_no_more_than_there_is() -> None:
    """One device for two, at half speed each: 100 % used, not 200; each did the work it came for."""
    trace = trace_of([(0, 1, 10), (0, 1, 30)])
    plans = [Plan([Start("j0", (0,), shared=True), Start("j1", (0,), shared=True)])]
    outcome = Simulation(trace, Cluster([1]), Scripted(*plans)).run()
    assert outcome.finish_s.tolist() == [20, 40]
    assert outcome.service_s.tolist() == [10, 30]
    assert outcome.busy_s.tolist() == [10, 30]
    found = summary(outcome)
    assert (found["utilization"], found["held"]) == (1.0, 1.0)


def test_where_packing_pays_a_device_is_still_used_once() -> None:
    trace = trace_of([(0, 1, 9), (0, 1, 9)])
    plans = [Plan([Start("j0", (0,), shared=True), Start("j1", (0,), shared=True)])]
    speed = MeasuredSpeed(SpeedFile(packed=0.9))
    outcome = Simulation(trace, Cluster([1]), Scripted(*plans), speed=speed).run()
    assert outcome.finish_s.tolist() == pytest.approx([10, 10])
    assert outcome.service_s.tolist() == pytest.approx([9, 9])
    assert summary(outcome)["utilization"] == pytest.approx(1.0)


def test_what_a_switch_holds_is_shared_out_among_those_on_the_device() -> None:
    """Job 1 comes back to the device of job 0 at 20 and needs 4 s; job 0 ends at 22."""
    trace = trace_of([(0, 1, 21), (0, 1, 10)])
    plans = [
        Plan([Start("j0", (0,), shared=True), Start("j1", (1,))], 5.0),
        Plan([Suspend("j1")], 20.0),
        Plan([Start("j1", (0,), shared=True)]),
    ]
    outcome = Simulation(trace, Cluster([2]), Scripted(*plans), cost=FixedCost(4.0)).run()
    assert outcome.finish_s.tolist() == [22, 29]
    assert outcome.busy_s.tolist() == [20 + 2 / 2, 10]
    assert outcome.lost_s.tolist() == [0, 2 / 2 + 2]
    assert outcome.switching_s.tolist() == [0, 4]


def test_who_lets_another_on_its_devices_does_not_switch() -> None:
    """Job 0 gets company at 5, as in a live scheduler without leaving the device."""
    plans = [
        Plan([Start("j0", (0,))], 5.0),
        Plan([Migrate("j0", (0,), shared=True), Start("j1", (0,), shared=True)]),
    ]
    outcome = Simulation(
        trace_of([(0, 1, 10), (0, 1, 5)]), Cluster([1]), Scripted(*plans), cost=FixedCost(4.0)
    ).run()
    assert outcome.finish_s.tolist() == [15, 15]
    assert outcome.migrations.tolist() == [0, 0]
    assert (outcome.lost_s.tolist(), outcome.switching_s.tolist()) == ([0, 0], [0, 0])


def test_who_gets_company_while_it_resumes_still_resumes() -> None:
    """Job 0 resumes from 3 to 7; the other comes at 5 and takes half of the device."""
    plans = [
        Plan([Start("j0", (0,))], 2.0),
        Plan([Suspend("j0")], 3.0),
        Plan([Start("j0", (0,))], 5.0),
        Plan([Migrate("j0", (0,), shared=True), Start("j1", (0,), shared=True)]),
    ]
    outcome = Simulation(
        trace_of([(0, 1, 10), (0, 1, 30)]), Cluster([1]), Scripted(*plans), cost=FixedCost(4.0)
    ).run()
    assert outcome.finish_s.tolist() == [7 + 16, 23 + 21]
    assert outcome.switching_s.tolist() == [4, 0]
    assert outcome.lost_s.tolist() == [2 + 2 / 2, 0]
