"""Optimus and SLAQ: devices to whoever gains most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.policies.marginal import MarginalPolicy
from gpuslice.sched_core.policies.optimus import Optimus
from gpuslice.sched_core.policies.slaq import Slaq
from gpuslice.sched_core.policy import Plan, View
from gpuslice.sched_core.traces.trace import Trace

from .worlds import check, same, simulate, trace, traces

Policies = pytest.mark.parametrize("make", [Optimus, Slaq])


@Policies
@given(traces(), st.sampled_from([100.0, 600.0]))
@settings(max_examples=20, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(
    make: Callable[..., MarginalPolicy], jobs: Trace, interval_s: float
) -> None:
    first = simulate(jobs, make(interval_s=interval_s))
    check(first)
    assert same(first, simulate(jobs, make(interval_s=interval_s)))


@Policies
def test_an_elastic_job_alone_takes_the_cluster(make: Callable[..., MarginalPolicy]) -> None:
    outcome = simulate(trace((0, 2, 4000), least_devices=[1], most_devices=[8]), make(), "1x8")
    assert len(outcome.spans[-1].devices) == 8
    assert outcome.finish_s[0] <= 1600


def test_optimus_prefers_the_job_that_is_nearly_done() -> None:
    # Both have shown their curves by 600 s; the first ends at 1,000 s of progress, the second at 20,000.
    jobs = trace((0, 4, 1000), (0, 4, 20000), (400, 8, 500))
    outcome = simulate(jobs, Optimus(interval_s=100))
    assert outcome.preemptions[0] == 0
    assert outcome.finish_s[0] == 1000


def test_optimus_learns_the_end_of_a_job_without_being_told() -> None:
    ends_s: list[float] = []

    class Watching(Optimus):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            for job in view.jobs.values():
                if self.losses[job.id].curve() is not None:
                    ends_s.append(job.progress_at(view.now_s) + self.left_s(job, view))
            return plan

    assert not Optimus.needs_durations
    simulate(trace((0, 8, 5000)), Watching(interval_s=100))
    assert ends_s[0] == pytest.approx(5000, rel=0.1)
    assert ends_s[-1] == pytest.approx(5000, rel=0.01)


def test_slaq_moves_on_when_a_loss_has_flattened() -> None:
    # The first job's loss has all but stopped falling when the second arrives.
    outcome = simulate(trace((0, 8, 10_000), (7_000, 8, 1_000)), Slaq(interval_s=100))
    assert outcome.preemptions[0] >= 1
    assert outcome.finish_s[1] < 10_000


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="interval_s=0"):
        Slaq(interval_s=0)
    with pytest.raises(ConfigError, match="converged=1"):
        Optimus(converged=1)


def greedy(policy: MarginalPolicy, view: View) -> dict[str, int]:
    """Devices by job, the plain way: of all steps that still fit, the most urgent, again and again."""
    counts = {job.id: 0 for job in view.jobs.values()}
    left = view.cluster.size
    while True:
        steps = []
        for job in view.jobs.values():
            have = counts[job.id]
            least = job.spec.least_devices or job.demand
            get = have + 1 if have else least
            if get <= max(job.spec.most_devices or job.demand, least) and get - have <= left:
                steps.append((policy.urgency(job, have, get, view), job.number, job.id, get))
        if not steps:
            return counts
        _, _, name, get = min(steps)
        left -= get - counts[name]
        counts[name] = get


@Policies
def test_looking_at_a_few_jobs_gives_what_looking_at_all_gives(make: Callable[..., MarginalPolicy]) -> None:
    base = make(interval_s=600.0)
    looks = 0

    class Checked(type(base)):  # type: ignore[misc]
        def _anew(self, view: View) -> dict[str, int]:
            nonlocal looks
            looks += 1
            found: dict[str, int] = super()._anew(view)
            assert {name: count for name, count in found.items() if count} == {
                name: count for name, count in greedy(self, view).items() if count
            }
            return found

    rows = [(300.0 * i, 1 + i % 4, 900.0 + 700.0 * (i * 7 % 11)) for i in range(24)]
    elastic = {
        "least_devices": [1 if i % 3 else 0 for i in range(24)],
        "most_devices": [i % 5 * 2 for i in range(24)],
    }
    simulate(trace(*rows, **elastic), Checked(interval_s=600.0))
    assert looks > 10
