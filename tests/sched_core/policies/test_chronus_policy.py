"""Chronus in the simulator."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from hypothesis import given, settings

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.chronus.policy import Chronus
from gpuslice.sched_core.sim import table
from gpuslice.sched_core.sim.metrics import summary
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, jct_s, same, simulate, trace, traces


@given(traces())
@settings(max_examples=30, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace) -> None:
    first = simulate(jobs, Chronus(lease_s=600, best_effort_lease_s=300))
    check(first)
    assert same(first, simulate(jobs, Chronus(lease_s=600, best_effort_lease_s=300)))


def test_a_deadline_takes_the_devices_from_best_effort_at_the_next_lease() -> None:
    jobs = trace((0, 8, 5000), (100, 8, 1000), deadlines=[(), ((2000.0, 10.0),)])
    policy = Chronus(lease_s=500, best_effort_lease_s=500)
    outcome = simulate(jobs, policy)
    assert jct_s(outcome)[1] <= 2000
    assert outcome.preemptions.tolist()[0] >= 1
    assert policy.counters["guaranteed"] == 1


def test_an_impossible_deadline_is_not_guaranteed_and_waits_like_the_rest() -> None:
    jobs = trace((0, 8, 500), (0, 8, 1000), deadlines=[(), ((900.0, 10.0),)])
    policy = Chronus(lease_s=500, best_effort_lease_s=500)
    outcome = simulate(jobs, policy)
    assert policy.counters["not_guaranteed"] == 1
    assert outcome.finish_s.tolist() == [500, 1500]


def test_what_is_guaranteed_is_not_given_away_to_a_newcomer() -> None:
    # Two jobs that each need 2 of the next 3 leases: only one can be promised.
    jobs = trace((0, 8, 10), (1, 8, 1000), (2, 8, 1000), deadlines=[(), ((2099.0, 1.0),), ((2098.0, 1.0),)])
    policy = Chronus(lease_s=500, best_effort_lease_s=500)
    outcome = simulate(jobs, policy)
    assert (policy.counters["guaranteed"], policy.counters["not_guaranteed"]) == (1, 1)
    assert jct_s(outcome)[1] <= 2099


def test_without_deadlines_it_is_shortest_remaining_work_first() -> None:
    jobs = trace((0, 8, 100), (0, 8, 30), (0, 8, 60))
    outcome = simulate(jobs, Chronus())
    assert outcome.finish_s.tolist() == [190, 30, 90]


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="lease_s=0"):
        Chronus(lease_s=0)


def test_results_name_the_solver() -> None:
    outcome = simulate(trace((0, 1, 10)), Chronus())
    assert outcome.solver == f"highspy {version('highspy')}"
    assert summary(outcome)["solver"] == outcome.solver
    assert table.render([outcome]).splitlines()[-1] == f"chronus: plans by {outcome.solver}"
    assert summary(simulate(trace((0, 1, 10)), Chronus(solver="greedy")))["solver"] is None


def test_a_job_that_runs_without_a_lease_is_not_taken_to_run_until_the_next_one() -> None:
    # Guaranteed jobs come last at the boundaries of best effort: the first is suspended at 600 for the third.
    due_s = 2400.0
    jobs = trace(
        (10, 1, 1180), (20, 1, 1200), (30, 1, 100), deadlines=[((due_s - 10, 1.0),), ((due_s - 20, 1.0),), ()]
    )
    policy = Chronus(solver="greedy")
    outcome = simulate(jobs, policy, "1x1")
    met = outcome.finish_s[:2] <= due_s
    assert policy.counters["guaranteed"] == met.sum() == 1
