"""Gandiva: homes by affinity, slices, packing by trial, migration, growing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.policies.gandiva.policy import Gandiva
from gpuslice.sched_core.policies.gandiva.servers import Servers
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.model import FixedCost
from gpuslice.sched_core.sim.speed import MeasuredSpeed, SpeedFile
from gpuslice.sched_core.traces.trace import Trace

from ..driver import Driver
from .worlds import check, jct_s, same, simulate, trace, traces


def job(name: str, demand: int) -> Job:
    return Job(JobSpec(id=name, submit_s=0.0, devices=demand), 0)


@given(traces(), st.sampled_from(["reactive", "introspective"]), st.sampled_from([1.0, 2.0, 8.0]))
@settings(max_examples=40, deadline=None)
def test_conserves_service_and_devices_and_repeats_itself(jobs: Trace, mode: Any, overload: float) -> None:
    def policy() -> Gandiva:
        return Gandiva(mode=mode, overload=overload, packing=False)

    first = simulate(jobs, policy())
    check(first)
    assert same(first, simulate(jobs, policy()))


@given(traces(), st.sampled_from([0.4, 0.8]))
@settings(max_examples=30, deadline=None)
def test_with_packing_every_job_still_gets_its_work_done(jobs: Trace, packed: float) -> None:
    speed = MeasuredSpeed(SpeedFile(packed=packed))
    first = simulate(jobs, Gandiva(), speed=speed)
    check(first, packing=True)
    assert same(first, simulate(jobs, Gandiva(), speed=speed))


def test_a_home_is_found_in_the_order_of_the_paper() -> None:
    servers = Servers(Cluster.parse("3x4"), overload=2.0)
    homes: dict[str, int] = {}
    for name, demand in [("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", 4), ("f", 2), ("g", 4), ("h", 4)]:
        arriving = job(name, demand)
        home = servers.find(arriving)
        if home is not None:
            homes[name] = home[0].node
            servers.settle(arriving, home, 0.0)
    # a, c: affinity 2, one server. b, d: affinity 1, the next. e: the last. f and g over-subscribe their own
    # kind. h finds its own server full twice over, and the one of b and d takes 4 more.
    assert homes == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 2, "f": 0, "g": 2, "h": 1}


def test_a_job_larger_than_a_server_gets_none_that_is_lost() -> None:
    servers = Servers(Cluster.parse("2x8+1x4").without([0]), overload=4.0)
    small, large = job("small", 8), job("large", 12)
    home = servers.find(small)
    assert home is not None
    servers.settle(small, home, 0.0)
    home = servers.find(large)
    assert home is not None
    assert [server.node for server in home] == [2, 1]


def test_jobs_take_turns_by_the_minute_and_all_start_at_once() -> None:
    outcome = simulate(trace((0, 4, 300), (0, 4, 300), (0, 4, 300)), Gandiva(mode="reactive"), "1x4")
    assert outcome.first_start_s.tolist() == [0, 60, 120]
    assert outcome.finish_s.tolist() == [780, 840, 900]


def test_weights_give_longer_turns() -> None:
    outcome = simulate(trace((0, 4, 600), (0, 4, 600), weight=[1.0, 3.0]), Gandiva(mode="reactive"), "1x4")
    # The heavy job has three of four slices: it is done when the light one has had a quarter.
    assert outcome.finish_s[1] == pytest.approx(800, abs=60)
    assert outcome.finish_s[0] == 1200


def test_a_departure_lets_a_crowded_server_move_a_job_over() -> None:
    jobs = trace((0, 4, 1000), (1, 4, 100), (2, 4, 1000))
    moving, staying = (simulate(jobs, Gandiva(migration=migration)) for migration in (True, False))
    assert sum(jct_s(moving)) < sum(jct_s(staying))
    assert max(moving.finish_s) <= 1200


def test_packing_is_kept_where_it_pays_and_undone_where_it_does_not() -> None:
    jobs = trace((0, 4, 3000), (0, 4, 3000), model=["a", "b"])
    turns = simulate(jobs, Gandiva(packing=False), "1x4")
    assert max(turns.finish_s) == 6000
    good = Gandiva()
    packed = simulate(jobs, good, "1x4", speed=MeasuredSpeed(SpeedFile(packed=0.9)))
    assert max(packed.finish_s) < 3700
    assert good.counters["packings_kept"] == 1
    bad = Gandiva()
    undone = simulate(jobs, bad, "1x4", speed=MeasuredSpeed(SpeedFile(packed=0.3)))
    assert bad.counters["packings_undone"] == 1
    # The trial costs 300 s at six tenths of the progress.
    assert max(undone.finish_s) == pytest.approx(6120, abs=60)


def test_a_pair_is_not_kept_for_what_its_host_does_while_the_guest_is_brought_back() -> None:
    jobs = trace((0, 4, 3000), (0, 4, 3000), model=["a", "b"])
    policy = Gandiva()
    simulate(jobs, policy, "1x4", speed=MeasuredSpeed(SpeedFile(packed=0.5)), cost=FixedCost(62.0))
    assert (policy.counters["packings_kept"], policy.counters["packings_undone"]) == (0, 1)


def test_nobody_is_packed_where_rates_are_not_measured() -> None:
    """A live scheduler takes every job's rate for 1: each pair would seem to make twice the progress."""
    jobs = trace((0, 4, 3000), (0, 4, 3000))
    policy = Gandiva()
    simulation = Simulation(jobs, Cluster.parse("1x4"), policy)
    simulation.view.measures_rates = False
    simulation.run()
    assert policy.counters["packings_kept"] == policy.counters["packings_undone"] == 0
    assert not simulation.view.changes.reset
    assert (
        simulation.outcome.finish_s.tolist()
        == simulate(jobs, Gandiva(packing=False), "1x4").finish_s.tolist()
    )


def test_a_live_scheduler_does_not_measure_rates() -> None:
    driver = Driver(1, Gandiva(quantum_s=10, look_s=20))
    driver.running_pair()
    driver.wake(40)
    assert len(driver.core.ledger.holders(0)) == 1


def test_nobody_moves_within_a_server() -> None:
    """Two of three have the slice in turn: who goes on keeps its device, though another comes first."""
    jobs = trace((0, 1, 1000), (0, 1, 1000), (0, 1, 1000), (0, 1, 1000), weight=[3.0, 1.0, 1.0, 1.0])
    outcome = simulate(jobs, Gandiva(packing=False), "1x2", cost=FixedCost(1.0))
    assert outcome.preemptions.sum() > 0
    assert outcome.migrations.tolist() == [0, 0, 0, 0]


def test_elastic_jobs_grow_into_idle_devices_and_shrink_for_others() -> None:
    jobs = trace((0, 1, 3000), (1000, 3, 100), least_devices=[1, 0], most_devices=[4, 0])
    grown = Gandiva(look_s=300)
    outcome = simulate(jobs, grown, "1x4")
    assert grown.counters["grown"] >= 1
    # 300 s alone, then four devices until 1,000 s: the newcomer starts at once.
    assert outcome.first_start_s[1] == 1000
    assert outcome.finish_s[0] < 1200


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"overload=0\.5"):
        Gandiva(overload=0.5)
