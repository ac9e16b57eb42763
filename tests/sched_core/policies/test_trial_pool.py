"""Trials on a small pool, around any policy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import PolicyError, Start
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, trace, traces, view

POLICIES = ["fifo", "srtf", "2das", "yarn-cs", "themis", "chronus", "gandiva", "optimus"]


@given(traces(demands=(1, 2, 3, 4)), st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace, name: str) -> None:
    options = {"trial_nodes": 1, "trial_s": 200, **({"packing": False} if name == "gandiva" else {})}
    # Elastic jobs may grow to eight devices, which is what the policy has.
    first = simulate(jobs, make_policy(name, options), "3x4")
    check(first)
    assert same(first, simulate(jobs, make_policy(name, options), "3x4"))


def test_a_broken_job_ends_on_the_pool_beside_a_full_cluster() -> None:
    jobs = trace((0, 8, 10_000), (10, 1, 60), (20, 4, 1000))
    policy = make_policy("fifo", {"trial_nodes": 1, "trial_s": 100})
    outcome = simulate(jobs, policy, "3x4")
    # The first is larger than the pool and starts at once; the second ends in its trial; the third waits for
    # the pool, has its 100 s there, and then waits for the first.
    assert outcome.first_start_s.tolist() == [0, 10, 70]
    assert outcome.finish_s.tolist() == [10_000, 70, 10_900]
    assert policy.counters["ended_in_trial"] == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_that_is_larger_than_the_rest_is_stopped_and_the_others_go_on(name: str) -> None:
    policy = make_policy(name, {"trial_nodes": 1, "trial_s": 100})
    outcome = simulate(trace((0, 1, 500), (10, 6, 100), (20, 4, 500)), policy)
    assert outcome.stopped.tolist() == [False, True, False]
    assert outcome.finish_s[1] == 10
    assert outcome.executed_s.tolist() == [500, 0, 500]
    assert policy.counters["too_large_for_trials"] == 1  # type: ignore[attr-defined]


def test_a_job_that_may_not_be_on_the_pool_holds_up_no_trial() -> None:
    moment = view("3x4", ("elsewhere", 1, 1000.0), ("tried", 1, 1000.0))
    moment.jobs["elsewhere"].within = (0, 1)
    decisions = make_policy("fifo", {"trial_nodes": 1, "trial_s": 100}).plan(moment).decisions
    assert set(decisions) == {Start("elsewhere", (0,)), Start("tried", (8,))}


def test_a_pool_that_leaves_too_little_is_refused() -> None:
    with pytest.raises(PolicyError, match="fifo failed: a trial pool of 2 nodes leaves nothing") as caught:
        simulate(trace((0, 1, 1)), make_policy("fifo", {"trial_nodes": 2}))
    assert caught.value.remedy == "choose a smaller pool"
    with pytest.raises(ConfigError, match="trial_s=0"):
        make_policy("fifo", {"trial_nodes": 1, "trial_s": 0})
