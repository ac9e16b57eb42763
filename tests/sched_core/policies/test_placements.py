"""What must hold of every policy with every placement."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.placement.registry import PLACEMENTS, make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, trace, traces

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


def test_a_placement_is_an_option_with_options_of_its_own() -> None:
    jobs = trace((0, 2, 10), skew=[0.2])
    for threshold, devices in (("0.1", (2, 3)), ("0.3", (0, 1))):
        options = {"placement": "skew", "placement.threshold": threshold}
        (span,) = simulate(jobs, make_policy("fifo", options), "2x1+1x2").spans
        assert span.devices == devices


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"placement": "nowhere"}, "no placement 'nowhere'"),
        ({"placement": "spread", "placement.seed": "1"}, "no option 'seed'"),
        ({"placement.threshold": "1"}, "placement.threshold is of no use without a placement"),
        ({"placement": "spread", "relax_after_s": "60"}, "a placement of its own"),
    ],
)
def test_placements_that_cannot_be_are_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_policy("fifo", options)
    with pytest.raises(ConfigError, match="two placements, spread and random"):
        make_policy("fifo", {"placement": "spread"}, make_placement("random"))


@pytest.mark.parametrize("policy", SELF_PLACED)
def test_policies_that_place_jobs_themselves_refuse_one(policy: str) -> None:
    with pytest.raises(ConfigError, match="places jobs itself"):
        make_policy(policy, placement=make_placement("spread"))
    with pytest.raises(ConfigError, match="places jobs itself"):
        make_policy(policy, {"placement": "spread"})
