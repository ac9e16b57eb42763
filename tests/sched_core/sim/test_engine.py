"""The event loop: conservation, determinism, no device twice, plans that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.registry import make_policy, policy_names
from gpuslice.sched_core.policy import Migrate, Plan, PolicyError, Start, Stop, Suspend, View
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.model import FixedCost
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.traces.trace import Trace

ROWS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 2, 3, 4, 8]), st.integers(1, 40)),
    min_size=1,
    max_size=25,
)
#: Policies that order jobs; each must keep these promises with every placement.
POLICIES = ["fifo", "fjf", "smallest", "sjf", "srtf", "srsf", "las", "rr", "2das", "gittins"]


def trace_of(rows: list[tuple[int, int, int]], **extras: list[object]) -> Trace:
    submit, demand, duration = zip(*rows, strict=True)
    return Trace([f"j{i}" for i in range(len(rows))], submit, demand, duration, extras)


def check_promises(outcome: Outcome, devices: int, *, elastic: bool = False) -> None:
    """Service delivered is service demanded, and no device is held twice at any instant."""
    trace = outcome.trace
    for i in range(len(trace)):
        assert outcome.finish_s[i] >= trace.submit_s[i] + trace.duration_s[i] - 1e-6 or elastic
        assert outcome.executed_s[i] == pytest.approx(trace.duration_s[i]) or elastic
        assert outcome.service_s[i] == pytest.approx(trace.duration_s[i] * trace.demand[i]) or elastic
        assert outcome.first_start_s[i] >= trace.submit_s[i]
    by_device: dict[int, list[tuple[float, float]]] = {}
    for span in outcome.spans:
        assert elastic or len(span.devices) == trace.demand[span.job]
        for device in span.devices:
            assert 0 <= device < devices
            by_device.setdefault(device, []).append((span.start_s, span.end_s))
    for held in by_device.values():
        for (_, end_s), (start_s, _) in pairwise(sorted(held)):
            assert start_s >= end_s


@pytest.mark.parametrize("placement", ["count", "consolidated", "spread", "random", "skew"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=8, deadline=None)
@given(rows=ROWS, cost_s=st.sampled_from([0.0, 2.5]))
def test_promises(policy: str, placement: str, rows: list[tuple[int, int, int]], cost_s: float) -> None:
    options = {"quantum_s": 5.0} if policy in ("las", "rr") else {}
    models = [["vgg16", "resnet50"][i % 2] for i in range(len(rows))]
    outcome = Simulation(
        trace_of(rows, model=models),
        Cluster.parse("2x4"),
        make_policy(policy, options, make_placement(placement)),
        cost=FixedCost(cost_s),
        keep_spans=True,
    ).run()
    check_promises(outcome, 8)


@pytest.mark.parametrize("policy", ["fjf", "smallest", "srtf", "srsf", "las", "rr", "2das", "gittins"])
@settings(max_examples=15, deadline=None)
@given(rows=ROWS)
def test_work_is_conserved(policy: str, rows: list[tuple[int, int, int]]) -> None:
    """No job waits while as many devices as it asks for are free (any devices will do)."""
    outcome = Simulation(trace_of(rows), Cluster.parse("2x4"), make_policy(policy), keep_spans=True).run()
    assert outcome.fragmented_s.sum() == 0
    moments = sorted({moment for span in outcome.spans for moment in (span.start_s, span.end_s)})
    for moment in moments:
        holding = {span.job for span in outcome.spans if span.start_s <= moment < span.end_s}
        free = 8 - sum(outcome.trace.demand[job] for job in holding)
        for job in set(range(len(rows))) - holding:
            waits = outcome.trace.submit_s[job] <= moment < outcome.finish_s[job]
            assert not (waits and outcome.trace.demand[job] <= free)


@pytest.mark.parametrize("policy", [*POLICIES])
def test_same_input_same_output(policy: str, simulate: Callable[..., Outcome]) -> None:
    draw = random.Random(3)
    rows = [(draw.random() * 100, draw.choice([1, 2, 4]), draw.random() * 50) for _ in range(60)]
    first, second = (simulate(rows, "2x4", policy, placement="random") for _ in range(2))
    assert first.finish_s.tobytes() == second.finish_s.tobytes()
    assert [span.devices for span in first.spans] == [span.devices for span in second.spans]


def test_all_names_build() -> None:
    for name in policy_names():
        assert make_policy(name).plan


def test_a_switch_costs_time_on_the_devices() -> None:
    """Job 0 is suspended at 2 and resumed at 5: 3 s later it makes progress again."""
    trace = trace_of([(0, 1, 10), (2, 1, 3)])
    outcome = Simulation(
        trace, Cluster([1]), make_policy("srtf"), cost=FixedCost(3.0), switch_share=0.0, keep_spans=True
    ).run()
    assert outcome.finish_s.tolist() == [16, 5]
    assert outcome.lost_s.tolist() == [3, 0]
    assert outcome.executed_s.tolist() == [10, 3]


def test_cost_is_not_charged_for_time_it_did_not_take() -> None:
    """Job 0 is suspended again 1 s into its resume of 3 s."""
    trace = trace_of([(0, 1, 10), (2, 1, 3), (6, 1, 1)])
    outcome = Simulation(
        trace, Cluster([1]), make_policy("srtf"), cost=FixedCost(3.0), switch_share=0.0
    ).run()
    assert outcome.lost_s.tolist() == [1 + 3, 0, 0]
    assert outcome.finish_s.tolist() == [7 + 3 + 8, 5, 7]


def test_waiting_time_is_split_by_cause(simulate: Callable[..., Outcome]) -> None:
    """Both nodes are full until 4; until 6 one device is free, and until 10 one on each node."""
    rows = [(0, 3, 10), (0, 3, 20), (0, 1, 4), (0, 1, 6), (1, 2, 5)]
    outcome = simulate(rows, "2x4", "fjf", placement="consolidated")
    assert outcome.first_start_s.tolist() == [0, 0, 0, 0, 10]
    assert outcome.fragmented_s.tolist() == [0, 0, 0, 0, 4]


class Scripted:
    """Returns the plans it was given, one after the other."""

    name = "scripted"
    needs_durations = False

    def __init__(self, *plans: Plan) -> None:
        self._plans = list(plans)

    def plan(self, view: View) -> Plan:
        return self._plans.pop(0) if self._plans else Plan()


ROW = [(0, 2, 10), (0, 1, 10)]


@pytest.mark.parametrize(
    ("decisions", "named"),
    [
        ([Start("nobody", (0, 1))], "no unfinished job 'nobody'"),
        ([Start("j0", (0,))], "asks for 2 devices and is given 1"),
        ([Start("j0", (0, 4))], "device 4 does not exist"),
        ([Start("j0", (1, 1))], "device 1 is named twice"),
        ([Start("j0", (0, 1)), Start("j1", (1,))], "device 1"),
        ([Start("j0", (0, 1), True), Start("j1", (1,))], "device 1"),
        ([Suspend("j0")], "j0 is waiting already"),
        ([Start("j1", (0,)), Start("j1", (1,))], "two decisions on job j1"),
    ],
)
def test_impossible_plans_are_refused_with_the_plan(decisions: list[object], named: str) -> None:
    simulation = Simulation(trace_of(ROW), Cluster([4]), Scripted(Plan(decisions)))
    with pytest.raises(PolicyError, match=named) as caught:
        simulation.run()
    assert "policy scripted returned an impossible plan" in str(caught.value)
    assert decisions[0].job in str(caught.value)


def test_a_policy_that_never_runs_a_job_is_named() -> None:
    with pytest.raises(PolicyError, match="scripted never runs j0, j1"):
        Simulation(trace_of(ROW), Cluster([4]), Scripted()).run()


def test_waking_without_end_is_found_out() -> None:
    class Sleeper(Scripted):
        def plan(self, view: View) -> Plan:
            return Plan(wake_at_s=view.now_s + 1)

    with pytest.raises(PolicyError, match="never runs"):
        Simulation(trace_of(ROW), Cluster([4]), Sleeper()).run()


def test_waking_must_be_later() -> None:
    with pytest.raises(PolicyError, match=r"asks at 0 to be woken at 0"):
        Simulation(trace_of(ROW), Cluster([4]), Scripted(Plan(wake_at_s=0))).run()


def test_durations_are_hidden_unless_declared() -> None:
    class Peeking(Scripted):
        def plan(self, view: View) -> Plan:
            view.remaining_s(next(view.waiting()))
            return Plan()

    with pytest.raises(PolicyError, match="duration of job j0 is not known"):
        Simulation(trace_of(ROW), Cluster([4]), Peeking()).run()


def test_packed_jobs_share_a_device_and_its_speed() -> None:
    plans = Plan([Start("j0", (0, 1), True), Start("j1", (1,), True)])
    outcome = Simulation(trace_of(ROW), Cluster([2]), Scripted(plans)).run()
    # Half speed each: j1 needs 20 s, and so does j0; both end together.
    assert outcome.finish_s.tolist() == [20, 20]


def test_a_job_left_alone_speeds_up() -> None:
    plans = Plan([Start("j0", (0,), True), Start("j1", (0,), True)])
    outcome = Simulation(trace_of([(0, 1, 10), (0, 1, 4)]), Cluster([1]), Scripted(plans)).run()
    assert outcome.finish_s.tolist() == [14, 8]


def test_elastic_jobs_scale_with_their_devices() -> None:
    trace = trace_of([(0, 2, 10), (5, 1, 1)], least_devices=[1, 0], most_devices=[4, 0])
    plans = [Plan([Start("j0", (0,))]), Plan([Migrate("j0", (0, 1, 2, 3)), Start("j1", (4,))])]
    result = Simulation(trace, Cluster([5]), Scripted(*plans)).run()
    # 5 s at half speed, then double speed for the 7.5 s of work left.
    assert result.finish_s.tolist() == [8.75, 6]
    assert result.migrations.tolist() == [1, 0]
    assert result.service_s.tolist() == [20, 1]


def test_stopped_jobs_end_unfinished() -> None:
    plans = [Plan([Start("j0", (0, 1)), Stop("j1", "refused")])]
    outcome = Simulation(trace_of(ROW), Cluster([4]), Scripted(*plans)).run()
    assert outcome.stopped.tolist() == [False, True]
    assert outcome.finish_s.tolist() == [10, 0]


def test_interrupted_runs_keep_what_they_know() -> None:
    class Interrupting(Scripted):
        def plan(self, view: View) -> Plan:
            if view.changes.finished:
                raise KeyboardInterrupt
            return super().plan(view)

    plans = [
        Plan([Start("j0", (0, 1)), Start("j1", (2,))], wake_at_s=4),
        Plan([Suspend("j1")], wake_at_s=6),
        Plan([Start("j1", (3,))]),
    ]
    outcome = Simulation(trace_of([(0, 2, 10), (0, 1, 20)]), Cluster([4]), Interrupting(*plans)).run()
    assert not outcome.complete
    assert outcome.finish_s[0] == 10
    assert outcome.preemptions.tolist() == [0, 1]
    assert outcome.executed_s.tolist() == [10, 4]
    assert outcome.fragmented_s.tolist() == [0, 2]


def test_jobs_larger_than_the_cluster_are_named() -> None:
    with pytest.raises(UsageError, match="job j0 of trace asks for 2 devices of 1"):
        Simulation(trace_of(ROW), Cluster([1]), Scripted())


def test_jobs_of_no_length() -> None:
    outcome = Simulation(trace_of([(0, 1, 0), (0, 1, 3)]), Cluster([1]), make_policy("fifo")).run()
    assert outcome.finish_s.tolist() == [0, 3]
