"""What must hold of every policy with every placement."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.placement.registry import PLACEMENTS, make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, traces

PLACED = [
    "fifo",
    "fjf",
    "smallest",
    "sjf",
    "srtf",
    "srsf",
    "las",
    "rr",
    "2das",
    "gittins",
    "yarn-cs",
    "drf",
    "tetris",
]
SELF_PLACED = ["gandiva", "themis", "chronus", "optimus", "slaq"]


@given(traces(), st.sampled_from(PLACED), st.sampled_from(sorted(PLACEMENTS)))
@settings(max_examples=100, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace, policy: str, placement: str) -> None:
    first = simulate(jobs, make_policy(policy, placement=make_placement(placement)))
    check(first)
    assert same(first, simulate(jobs, make_policy(policy, placement=make_placement(placement))))


@pytest.mark.parametrize("policy", SELF_PLACED)
def test_policies_that_place_jobs_themselves_refuse_one(policy: str) -> None:
    with pytest.raises(ConfigError, match="places jobs itself"):
        make_policy(policy, placement=make_placement("spread"))
