"""What must hold of every policy with every placement."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.placement.nodes import SkewAware
from gpuslice.sched_core.placement.registry import PLACEMENTS, make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Changes, Plan, Start, View
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, trace, traces, view

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
        ({"placement": "spread", "relax_after_s": "60"}, "cannot be combined with a placement"),
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


def carry_out(plan: Plan, moment: View) -> None:
    """Let jobs have what ``plan`` says, one second later."""
    moment.now_s += 1.0
    moment.changes = Changes()
    for decision in plan.decisions:
        job = moment.jobs[decision.job]
        job.running = isinstance(decision, Start)
        job.since_s = moment.now_s
        if isinstance(decision, Start):
            job.placement = decision.devices


def test_a_job_whose_skew_was_measured_holds_up_nobody_who_may_lie_anywhere() -> None:
    policy = make_policy("srtf", placement=SkewAware())
    short = [(name, 1, 20.0) for name in "pqrs"]
    moment = view("4x2", *short, ("spread", 2, 100.0), ("wide", 3, 10.0), ("any", 2, 200.0))
    jobs = dict(moment.jobs)
    for node, name in enumerate("pqrs"):
        jobs[name].running, jobs[name].placement = True, (2 * node,)
    jobs["spread"].running, jobs["spread"].placement = True, (1, 3)
    moment.jobs = {name: jobs[name] for name in (*"pqrs", "spread")}
    carry_out(policy.plan(moment), moment)
    jobs["spread"].skew, jobs["any"].skew = 0.9, 0.1
    moment.jobs = jobs
    moment.changes.arrived += [jobs["wide"], jobs["any"]]
    carry_out(policy.plan(moment), moment)
    assert [name for name, job in jobs.items() if not job.running] == ["spread", "any"]
    left = jobs.pop("p")
    moment.changes.finished.append(left)
    carry_out(policy.plan(moment), moment)
    assert [name for name, job in jobs.items() if not job.running] == ["spread"], "no node has room for it"
