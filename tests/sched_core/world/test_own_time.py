"""Worlds with holds, moments, dependencies, limits and priorities: nobody starts early, every job ends."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.jobs.conditions import Conditions

from .own_time import with_own_times
from .record import Violation
from .scenario import draw_scenario
from .windows import with_windows
from .world import check


def test_whatever_goes_wrong_no_job_starts_before_its_time_and_none_waits_for_ever() -> None:
    for seed in range(6):
        check(with_own_times(draw_scenario(seed)))


def test_the_end_of_a_command_may_be_heard_of_too_late() -> None:
    """A job is started anew for other devices; its node is cut off before a scheduler hears of its end."""
    check(with_own_times(draw_scenario(11)))


@pytest.mark.parametrize("seed", [0, 23])
def test_trials_of_an_array_are_no_more_than_its_jobs_may_be(seed: int) -> None:
    check(with_own_times(with_windows(draw_scenario(seed))))


def test_an_order_to_stop_may_arrive_after_the_next_job_of_the_array() -> None:
    check(with_own_times(with_windows(draw_scenario(55))))


def test_a_rank_that_never_heard_of_a_lease_comes_to_a_device_of_it_that_is_drained() -> None:
    check(with_own_times(with_windows(draw_scenario(89))))


def test_devices_may_be_closed_meanwhile() -> None:
    for seed in range(6, 9):
        check(with_windows(with_own_times(draw_scenario(seed))))


def test_where_nothing_goes_wrong_all_is_the_same() -> None:
    for seed in range(3):
        check(with_own_times(draw_scenario(seed)).without_faults())


def test_a_world_notices_a_core_that_forgets_what_jobs_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conditions, "unmet", False)
    found = []
    for seed in range(4):
        try:
            check(with_own_times(draw_scenario(seed)))
        except Violation as violation:
            found.append(str(violation))
    assert any("before its time" in said for said in found)
