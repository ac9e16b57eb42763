"""Queues with capacities."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gpuslice.errors import ConfigError
from gpuslice.sched_core.placement.nodes import Consolidated
from gpuslice.sched_core.placement.placement import Count, Placement
from gpuslice.sched_core.policies.yarn_capacity import YarnCapacity
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, trace, traces


@given(traces())
@settings(max_examples=30, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace) -> None:
    first = simulate(jobs, YarnCapacity(capacities="a:3"))
    check(first)
    assert not first.preemptions.any()
    assert same(first, simulate(jobs, YarnCapacity(capacities="a:3")))


def test_the_queue_furthest_below_its_share_goes_first() -> None:
    # a is guaranteed 6 of 8 devices and uses 4; b uses 4 of its 2. At 100 s one job ends: 2/8 < 4/4.
    jobs = trace((0, 4, 100), (0, 4, 1000), (1, 4, 10), (2, 4, 10), tenant=["a", "b", "b", "a"])
    outcome = simulate(jobs, YarnCapacity(capacities="a:3,b:1"))
    assert outcome.first_start_s.tolist() == [0, 0, 110, 100]


def test_a_blocked_head_blocks_its_own_queue_only() -> None:
    jobs = trace((0, 5, 100), (1, 8, 10), (2, 1, 10), (3, 1, 10), tenant=["a", "a", "a", "b"])
    assert simulate(jobs, YarnCapacity()).first_start_s.tolist() == [0, 100, 110, 3]


def test_a_rigid_queue_does_not_outgrow_its_share() -> None:
    jobs = trace((0, 4, 100), (0, 2, 10), tenant=["a", "a"])
    assert simulate(jobs, YarnCapacity(capacities="a:1,b:1")).first_start_s.tolist() == [0, 0]
    held = simulate(jobs, YarnCapacity(capacities="a:1,b:1", elastic=False))
    assert held.first_start_s.tolist() == [0, 100]


@pytest.mark.parametrize("placement", [Count(), Consolidated()])
def test_small_jobs_of_others_do_not_starve_the_tenant_with_the_largest_share(placement: Placement) -> None:
    """One job of b ends every 10 s, another always waits: a, with 90 %, never found its 4 devices free."""
    small = [(10.0 * i, 1, 75) for i in range(200)]
    jobs = trace((35, 4, 100), *small, tenant=["a", *["b"] * len(small)])
    outcome = simulate(jobs, YarnCapacity(placement, capacities="a:9,b:1"), "2x4")
    check(outcome)
    assert outcome.first_start_s[0] <= 35 + 75


def test_a_reservation_holds_even_where_the_whole_cluster_is_asked_for() -> None:
    small = [(7.0 * i, 1, 50) for i in range(100)]
    jobs = trace((20, 8, 100), *small, tenant=["a", *["b"] * len(small)])
    assert simulate(jobs, YarnCapacity(capacities="a:9,b:1")).first_start_s[0] <= 20 + 50


def test_what_is_not_reserved_goes_to_others_meanwhile() -> None:
    # j2 waits for the node of j0, which began first: the last device of the other node is left for j3.
    jobs = trace(
        (0, 3, 100), (0, 3, 100), (1, 4, 100), (2, 1, 10), (3, 1, 10), tenant=["b", "b", "a", "b", "b"]
    )
    outcome = simulate(jobs, YarnCapacity(Consolidated(), capacities="a:9,b:1"), "2x4")
    assert outcome.first_start_s.tolist() == [0, 0, 100, 2, 12]


@pytest.mark.parametrize("text", ["a", "a:x", "a:-1", "a:0"])
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a share"):
        YarnCapacity(capacities=text)
