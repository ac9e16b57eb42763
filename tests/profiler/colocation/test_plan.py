"""The order of the trials: complete, another one in each round, and the same whenever it is asked for."""

from __future__ import annotations

import pytest

from gpuslice.errors import UsageError
from gpuslice.profiler.colocation.plan import Plan


def test_each_round_has_every_job_and_every_set_once() -> None:
    plan = Plan(4, 2, 3)
    trials = list(plan.trials())
    for number in range(3):
        members = [those for this, those in trials if this == number]
        assert len(members) == 4 + 6
        assert set(members) == {(0,), (1,), (2,), (3,), *plan.sets}


def test_the_first_round_begins_alone_and_the_others_are_mixed() -> None:
    plan = Plan(4, 3, 3)
    rounds = [[those for this, those in plan.trials() if this == number] for number in range(3)]
    assert rounds[0][:4] == [(0,), (1,), (2,), (3,)]
    assert rounds[1] != rounds[2]
    assert {len(those) for those in rounds[1][:4]} == {1, 3}


def test_it_goes_on_where_it_was_left() -> None:
    plan = Plan(3, 2, 2)
    trials = list(plan.trials())
    assert plan.remaining(trials[:5]) == trials[5:]
    assert plan.remaining(trials) == []
    assert Plan(3, 2, 3).remaining(trials) == list(Plan(3, 2, 3).trials())[len(trials) :]


@pytest.mark.parametrize(("jobs", "size", "repeats"), [(1, 2, 3), (3, 4, 3), (3, 1, 3), (3, 2, 1)])
def test_impossible_plans_are_refused(jobs: int, size: int, repeats: int) -> None:
    with pytest.raises(UsageError):
        Plan(jobs, size, repeats)
