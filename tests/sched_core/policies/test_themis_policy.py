"""Themis in the simulator: fairness, leases, apps with several jobs, conservation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.policies.fifo import Fifo
from gpuslice.sched_core.policies.themis.agent import Agent
from gpuslice.sched_core.policies.themis.arbiter import Arbiter, Contender
from gpuslice.sched_core.policies.themis.policy import Themis
from gpuslice.sched_core.policy import Changes, Plan, View
from gpuslice.sched_core.sim.metrics import finish_time_fairness
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.slowdown import Slowdown
from gpuslice.sched_core.traces.trace import Trace

from .worlds import Forgetful, Known, check, jct_s, same, simulate, trace, traces, view


@given(traces(), st.sampled_from(["none", "first", "halving"]), st.sampled_from(["lease", "devices"]))
@settings(max_examples=40, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace, tuner: Any, payment: Any) -> None:
    first = simulate(jobs, Themis(lease_s=600, tuner=tuner, payment=payment, rung_s=100))
    check(first)
    assert same(first, simulate(jobs, Themis(lease_s=600, tuner=tuner, payment=payment, rung_s=100)))


@given(traces(demands=(1, 2, 4)))
@settings(max_examples=25, deadline=None)
def test_an_idle_cluster_shares_with_nobody_and_rho_is_at_most_1(jobs: Trace) -> None:
    # 12 jobs of at most 4 devices never fill 12 nodes of 4.
    outcome = simulate(jobs, Themis(), "12x4")
    for life_s, alone_s in zip(jct_s(outcome), jobs.duration_s, strict=True):
        assert life_s <= alone_s + 1e-6


def test_two_apps_take_turns_and_both_get_their_half() -> None:
    outcome = simulate(trace((0, 8, 6000), (0, 8, 6000)), Themis(lease_s=600))
    # Alone on a half, each would take 12,000 s.
    assert max(jct_s(outcome)) == pytest.approx(12_000)
    assert sum(outcome.preemptions) >= 5


def test_the_first_model_ends_the_search() -> None:
    outcome = simulate(trace((0, 4, 3000), (0, 4, 1000), app=["x", "x"]), Themis(tuner="first"))
    assert outcome.stopped.tolist() == [True, False]
    assert outcome.finish_s.tolist() == [1000, 1000]


def test_two_first_models_at_one_instant_both_finish() -> None:
    rows = [(0, 2, 1000), (0, 2, 1000), (0, 2, 3000)]
    outcome = simulate(trace(*rows, app=["x"] * 3), Themis(tuner="first"))
    assert outcome.stopped.tolist() == [False, False, True]
    assert outcome.finish_s.tolist() == [1000, 1000, 1000]


def test_a_job_that_failed_ends_no_search() -> None:
    rows = [(0, 2, 500), (0, 2, 1000), (0, 2, 3000)]
    attempts = [((500.0, "user"),), ((600.0, "transient"), (400.0, "")), ((3000.0, ""),)]
    outcome = simulate(trace(*rows, app=["x"] * 3).changed(attempts=attempts), Themis(tuner="first"))
    assert outcome.stopped.tolist() == [False, False, True]
    assert outcome.finish_s.tolist() == [500, 1000, 1000]


def test_halving_keeps_the_better_half_at_every_rung() -> None:
    jobs = trace(*[(0, 2, 5000)] * 4, app=["x"] * 4)
    outcome = simulate(jobs, Themis(tuner="halving", rung_s=500, lease_s=500))
    assert sorted(outcome.finish_s.tolist()) == [500, 500, 1000, 5000]
    assert outcome.stopped.sum() == 3


def test_rho_by_hand() -> None:
    moment = view("2x4", ("a", 4, 1000.0), now_s=500.0)
    agent = Agent("a", 0.0, "all", Slowdown(2.0), crowd_s=0.0, ideal="times_n")
    job = moment.jobs["a"]
    agent.add(job, moment)
    # Two apps all the time: T_id = 1000 s · 2. Nothing held: ρ is infinite.
    assert agent.rho(moment, crowd_s=1000.0) == float("inf")
    free = FreeDevices(moment.cluster)
    bid = agent.bid(moment, 1000.0, free, [job], wait_s=1000.0)
    # One node: T_sh = 500 + 1000. Nothing: another 1000 s of waiting. No option is spread: both nodes fit it.
    assert [round(option.value, 6) for option in bid.options] == [round(2000 / 1500, 6)] * 2
    assert bid.nothing == pytest.approx(2000 / 2500)
    free.take([0, 4, 5])
    spread = agent.bid(moment, 1000.0, free, [job], wait_s=1000.0)
    # 3 + 1 devices on two nodes run at half speed: T_sh = 500 + 2000.
    assert [(option.counts, option.value) for option in spread.options] == [
        ({0: 3, 1: 1}, pytest.approx(0.8))
    ]


def test_the_ideal_is_a_share_of_the_devices() -> None:
    moment = view("2x4", ("a", 4, 1000.0), now_s=500.0)
    agent = Agent("a", 0.0, "all", Slowdown(), crowd_s=0.0)
    agent.add(moment.jobs["a"], moment)
    # With two apps half of the 8 devices is all it can use; with four apps, half of what it can use.
    assert agent.ideal_s(moment, crowd_s=1000.0) == 1000.0
    assert agent.ideal_s(moment, crowd_s=2000.0) == 2000.0


def test_the_ideal_follows_what_is_known_of_running_times_and_counts_each_job_once() -> None:
    moment = view("1x4", ("a", 4, 0.0), ("b", 4, 100.0), now_s=500.0)
    first, second = moment.jobs.values()
    agent = Agent("x", 0.0, "all", Slowdown(), crowd_s=0.0)
    agent.add(first, moment)
    agent.add(second, moment)
    assert agent.ideal_s(moment, crowd_s=500.0) == 100.0
    moment.knowledge = Known({"a": 300.0, "b": 100.0})
    assert agent.ideal_s(moment, crowd_s=500.5) == pytest.approx(400.0, rel=0.01)
    del agent.jobs["b"]  # its owner holds it back
    agent.add(second, moment)
    assert agent.ideal_s(moment, crowd_s=500.6) == pytest.approx(400.0, rel=0.01)


def test_contention_is_counted_since_an_app_was_seen() -> None:
    policy = Themis()
    moment = view("2x4", ("a", 8, 1000.0), ("b", 8, 1000.0), now_s=500.0)  # submitted at 0
    for now_s in (500.0, 600.0):
        moment.now_s = now_s
        policy.plan(moment)
        moment.changes = Changes()
    assert [agent.ideal_s(moment, crowd_s=200.0) for agent in policy.agents.values()] == [2000.0] * 2


def test_a_reset_forgets_neither_contention_nor_the_work_that_an_app_has_done() -> None:
    jobs = trace((0, 4, 1000), *[(0, 4, 9000)] * 5, app=["x", "x", "", "", "", ""])
    whole = simulate(jobs, Themis(lease_s=600, fairness=0.0))
    policy = Themis(lease_s=600, fairness=0.0)

    class Again(Forgetful):
        def plan(self, view: View) -> Plan:
            # Leases that are forgotten are over: only when they are anyway, nothing else is to change.
            return super().plan(view) if view.now_s % 600 == 0 else policy.plan(view)

    assert simulate(jobs, Again(policy)).spans == whole.spans
    assert policy.counters["auctions"] > 0


def test_leftovers_go_to_those_that_were_not_asked() -> None:
    moment = view("1x4", ("a", 2, 100.0), ("b", 1, 100.0), ("c", 1, 100.0), now_s=10.0)
    agents = []
    for job in moment.jobs.values():
        agents.append(Agent(job.id, 0.0, "all", Slowdown(), 0.0))
        agents[-1].add(job, moment)
    contenders = [Contender(agent, tuple(agent.jobs.values())) for agent in agents]
    arbiter = Arbiter(0.8, 8, whole_leases=True, seed=1)
    offer = FreeDevices(moment.cluster)
    grants = arbiter.share_out(moment, 30.0, offer, contenders, wait_s=1200.0)
    assert offer.total == 0
    assert {grant.job.id for grant in grants} == {"a", "b", "c"}


def test_a_job_that_needs_longer_than_it_said_bids_as_if_it_were_half_through() -> None:
    moment = view("1x4", ("a", 2, 100.0), ("b", 2, float("inf")), ("c", 2, 100.0), now_s=200.0)
    moment.jobs["b"].progress_s = 100.0
    agents = [Agent(job.id, 0.0, "all", Slowdown(), 0.0) for job in moment.jobs.values()]
    for agent, job in zip(agents, moment.jobs.values(), strict=True):
        agent.add(job, moment)
    assert agents[1].nothing(moment, 600.0, 60.0) == agents[1].ideal_s(moment, 600.0) / 360.0
    contenders = [Contender(agent, tuple(agent.jobs.values())) for agent in agents]
    arbiter = Arbiter(0.0, 8, whole_leases=False, seed=1)
    assert len(arbiter.share_out(moment, 600.0, FreeDevices(moment.cluster), contenders, 60.0)) == 2


def test_impossible_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="fairness=2"):
        Themis(fairness=2)
    with pytest.raises(ConfigError, match="rung_s=0"):
        Themis(rung_s=0)


@pytest.mark.parametrize("fairness", [0.0, 0.8])
def test_whoever_waits_longest_is_served(fairness: float) -> None:
    """Winning multiplies the value of an old app by almost 1: by the product alone it never had its turn."""
    jobs = trace(*[(i * 10_800, 1, 12_000) for i in range(45)])
    outcome = simulate(jobs, Themis(fairness=fairness), "1x1")
    in_turn = simulate(jobs, Fifo(), "1x1")
    assert longest_wait_s(outcome) < longest_wait_s(in_turn) == 52_800
    assert finish_time_fairness(outcome).max() < finish_time_fairness(in_turn).max()


def longest_wait_s(outcome: Outcome) -> float:
    """The longest time that a job was without devices, before its start or between its runs."""
    since_s = dict(enumerate(outcome.trace.submit_s))
    longest_s = 0.0
    for span in sorted(outcome.spans, key=lambda span: span.start_s):
        longest_s = max(longest_s, span.start_s - since_s[span.job])
        since_s[span.job] = span.end_s
    return longest_s


def test_an_elastic_app_alone_wins_all_that_it_can_use_and_two_share() -> None:
    elastic = {"least_devices": [1, 1], "most_devices": [8, 6]}
    alone = simulate(trace((0, 2, 4000), least_devices=[1], most_devices=[8]), Themis(), "1x8")
    assert alone.finish_s.tolist() == [1000]
    both = simulate(trace((0, 2, 4000), (0, 2, 4000), **elastic), Themis(lease_s=600), "1x8")
    assert sorted(len(span.devices) for span in both.spans if span.start_s == 0) == [4, 4]
    assert both.finish_s.tolist() == pytest.approx([2000, 2000])
