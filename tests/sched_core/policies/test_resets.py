"""Policies whose world is shown anew: what they know beyond their plans outlasts that."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.policies.gandiva.policy import Gandiva
from gpuslice.sched_core.policies.optimus import Optimus
from gpuslice.sched_core.policies.rr import RoundRobin

from .worlds import Forgetful, simulate, trace


def test_jobs_of_gandiva_stay_where_they_run() -> None:
    jobs = trace((0, 1, 100), *[(0, 1, 1000)] * 4)
    outcome = simulate(jobs, Forgetful(Gandiva()))
    assert outcome.migrations.tolist() == [0] * 5
    assert outcome.finish_s.tolist() == [100, *[1000] * 4]


def test_a_job_of_gandiva_on_several_servers_stays_there_too() -> None:
    jobs = trace((0, 2, 100), (0, 8, 1000), (50, 2, 1000))
    outcome = simulate(jobs, Forgetful(Gandiva()), "3x4")
    assert outcome.migrations.tolist() == [0] * 3
    assert outcome.finish_s.tolist() == [100, 1000, 1050]


@pytest.mark.parametrize("weight", [[1.0] * 4, [3.0, 1.0, 1.5, 1.0]])
def test_turns_of_round_robin_go_on(weight: list[float]) -> None:
    jobs = trace((0, 1, 9), (0, 1, 8), (0, 1, 7), (3.5, 1, 6), weight=weight)
    whole = simulate(jobs, RoundRobin(quantum_s=1), "1x1")
    assert simulate(jobs, Forgetful(RoundRobin(quantum_s=1)), "1x1").spans == whole.spans


def test_losses_that_were_seen_are_not_forgotten() -> None:
    policy = Optimus(interval_s=100)
    jobs = trace((0, 4, 3000), (0, 4, 3000))
    points: list[int] = []

    class Counted(Forgetful):
        def plan(self, view):  # type: ignore[no-untyped-def]
            plan = super().plan(view)
            points.extend(len(history._points) for history in policy.losses.values())
            return plan

    simulate(jobs, Counted(policy), "1x8")
    assert max(points) > 3
