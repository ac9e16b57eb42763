"""Gangs that move together when a job leaves, where it pays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.placement.closest import closest
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.model import FixedCost
from gpuslice.sched_core.sim.speed import MeasuredSpeed, SpeedFile
from gpuslice.sched_core.traces.trace import Trace

from .worlds import Outcome, check, same, simulate, trace, traces

APART = {"defragment": "true", "apart_nodes": "2.0", "apart_sockets": "1.5"}
TAKE_PLACEMENTS = (
    *("fifo", "fjf", "smallest", "sjf", "srtf", "srsf", "las", "rr", "2das", "gittins"),
    *("yarn-cs", "drf", "tetris"),
)


def run(jobs: Trace, cluster: str, cost_s: float, policy: str = "fifo", **options: str) -> Outcome:
    """Jobs that run at half their speed on more nodes than needed, and at two thirds on more sockets."""
    speed = MeasuredSpeed(SpeedFile(spread=2.0, sockets=1.5))
    made = make_policy(policy, {**APART, **options})
    return simulate(jobs, made, cluster, speed=speed, cost=FixedCost(cost_s))


def places(outcome: Outcome, job: int) -> list[tuple[int, ...]]:
    return [span.devices for span in outcome.spans if span.job == job]


# The first job leaves device 0 at 100 s. The gang is on devices 2 and 3 then, on two nodes of three devices.
SCATTERED = ((0, 1, 100), (0, 1, 900), (0, 2, 1000))


def test_a_gang_moves_together_when_that_saves_more_than_it_costs() -> None:
    outcome = run(trace(*SCATTERED), "2x3", 40.0, "srtf")
    assert places(outcome, 2) == [(2, 3), (2, 0)]  # rank 0 stays where it was
    assert outcome.finish_s[2] == 100 + 40 + 950
    assert outcome.migrations.tolist() == [0, 0, 1]
    assert outcome.counters == {"gangs_moved_together": 1, "jobs_made_room": 0}


def test_a_gang_stays_when_moving_costs_more_than_it_saves() -> None:
    outcome = run(trace(*SCATTERED), "2x3", 951.0, "srtf")
    assert places(outcome, 2) == [(2, 3)]
    assert outcome.finish_s[2] == 2000
    assert outcome.migrations.sum() == 0


@pytest.mark.parametrize(("cost_s", "moves"), [(49.0, 1), (51.0, 0)])
def test_who_knows_no_durations_expects_as_much_work_as_was_done(cost_s: float, moves: int) -> None:
    jobs = trace((0, 1, 100), (0, 1, 5000), (0, 2, 1000))
    outcome = run(jobs, "2x3", cost_s, "fifo")  # 50 s of work by then
    assert outcome.migrations.tolist() == [0, 0, moves]


@pytest.mark.parametrize(("skew", "moves"), [(0.1, 0), (0.3, 1), (None, 1)])
def test_models_that_do_not_mind_stay(skew: float | None, moves: int) -> None:
    outcome = run(trace(*SCATTERED, skew=[None, None, skew]), "2x3", 40.0, "srtf")
    assert outcome.migrations.tolist() == [0, 0, moves]


def test_gangs_come_together_on_one_socket() -> None:
    outcome = run(trace((0, 1, 100), (0, 2, 1000)), "1x4/2", 40.0, "srtf")
    assert places(outcome, 1) == [(1, 2), (1, 0)]


@pytest.mark.parametrize(("cost_s", "moves"), [(40.0, [0, 1, 1, 0]), (700.0, [0, 0, 0, 0])])
def test_a_job_of_one_device_makes_room(cost_s: float, moves: list[int]) -> None:
    # Only device 4 is free, on a node of its own. 1,900 device-seconds can be saved; three devices switch.
    jobs = trace((0, 1, 100), (0, 1, 900), (0, 2, 1000), (0, 1, 6000))
    outcome = run(jobs, "2x2+1x1", cost_s, "srtf")
    assert outcome.migrations.tolist() == moves
    if moves[2]:
        assert places(outcome, 2) == [(1, 2), (1, 0)]
        assert places(outcome, 1) == [(0,), (2,)]


def test_nobody_moves_before_somebody_leaves() -> None:
    outcome = run(trace((0, 1, 900), (0, 1, 900), (0, 2, 1000), (500, 1, 10)), "2x3", 0.0, "srtf")
    assert places(outcome, 2)[0] == (2, 3)
    assert [span.start_s for span in outcome.spans if span.job == 2] == [0, 510]


@given(traces(), st.sampled_from(TAKE_PLACEMENTS), st.sampled_from([{}, {"relax_after_s": 200}]))
@settings(max_examples=80, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(
    jobs: Trace, name: str, more: dict[str, object]
) -> None:
    first = simulate(jobs, make_policy(name, {**APART, **more}), "2x3+2x2/2")
    check(first)
    assert same(first, simulate(jobs, make_policy(name, {**APART, **more}), "2x3+2x2/2"))


@given(traces(demands=(1, 2, 3, 4)), st.sampled_from(["fifo", "2das", "yarn-cs"]))
@settings(max_examples=20, deadline=None)
def test_beside_a_pool_for_trials(jobs: Trace, name: str) -> None:
    options = {**APART, "trial_nodes": 1, "trial_s": 100}
    check(simulate(jobs, make_policy(name, options), "3x4"))


def test_the_closest_devices_come_level_by_level() -> None:
    cluster = Cluster.parse("2x2x4/2")
    prices = dict.fromkeys([1, 2, 4, 6, 9, 10, 13], (0.0, 1))
    assert list(closest(2, prices, cluster)) == [(1, 2)]  # no socket has two
    assert list(closest(2, prices | {5: (9.0, 2)}, cluster)) == [(4, 5), (1, 2)]
    five = prices | {5: (1.0, 1), 7: (1.0, 1)}
    assert list(closest(5, five, cluster)) == [(4, 6, 5, 7, 1), (4, 6, 5, 7, 13)]


def test_options_that_contradict_each_other_are_refused() -> None:
    for name in ("gandiva", "themis", "chronus", "optimus", "slaq"):
        with pytest.raises(ConfigError, match=f"policy {name} places jobs itself"):
            make_policy(name, {"defragment": True})
    with pytest.raises(ConfigError, match="apart_nodes is of no use without defragment"):
        make_policy("fifo", {"apart_nodes": 1.5})
    with pytest.raises(ConfigError, match="speed-up"):
        make_policy("fifo", {"defragment": True, "apart_sockets": 0.5})
    with pytest.raises(ConfigError, match="moves do not look at node_cpus"):
        make_policy("drf", {"defragment": True, "node_cpus": 8})
