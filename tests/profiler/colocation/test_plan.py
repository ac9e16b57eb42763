"""The order of the trials: complete, another one in each round, and the same whenever it is asked for."""

from __future__ import annotations

import pytest

from gpuslice.errors import UsageError
from gpuslice.profiler.colocation.plan import Plan


def test_each_round_has_every_job_and_every_set_packed_and_sliced_once() -> None:
    plan = Plan(4, 2, 3)
    tasks = list(plan.tasks())
    for number in range(3):
        found = [(task.members, task.mode) for task in tasks if task.round == number]
        assert len(found) == 4 + 2 * 6
        together = {(members, mode) for members in plan.sets for mode in ("packed", "sliced")}
        assert set(found) == {((job,), "alone") for job in range(4)} | together


def test_the_first_round_begins_alone_and_the_others_are_mixed() -> None:
    plan = Plan(4, 3, 3)
    rounds = [[task.members for task in plan.tasks() if task.round == number] for number in range(3)]
    assert rounds[0][:4] == [(0,), (1,), (2,), (3,)]
    assert rounds[1] != rounds[2]
    assert {len(those) for those in rounds[1][:6]} == {1, 3}


def test_it_goes_on_where_it_was_left() -> None:
    plan = Plan(3, 2, 2)
    tasks = list(plan.tasks())
    assert plan.remaining(tasks[:5]) == tasks[5:]
    assert plan.remaining(tasks) == []
    assert Plan(3, 2, 3).remaining(tasks) == list(Plan(3, 2, 3).tasks())[len(tasks) :]


@pytest.mark.parametrize(("jobs", "size", "repeats"), [(1, 2, 3), (3, 4, 3), (3, 1, 3), (3, 2, 1)])
def test_impossible_plans_are_refused(jobs: int, size: int, repeats: int) -> None:
    with pytest.raises(UsageError):
        Plan(jobs, size, repeats)
