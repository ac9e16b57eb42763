"""Queues with capacities."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gpuslice.errors import ConfigError
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


@pytest.mark.parametrize("text", ["a", "a:x", "a:-1", "a:0"])
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a share"):
        YarnCapacity(capacities=text)
