"""Worlds with pauses, drains and reservations: nobody is where it may not be, and every job ends at last."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.jobs.closed_devices import ClosedDevices

from .record import Violation
from .scenario import draw_scenario
from .windows import with_windows
from .world import check


def test_whatever_goes_wrong_nobody_begins_on_a_closed_device() -> None:
    for seed in range(6):
        check(with_windows(draw_scenario(seed)))


def test_a_job_that_is_to_shrink_shares_no_device_before_it_has() -> None:
    check(with_windows(draw_scenario(40187)))


def test_where_nothing_goes_wrong_all_leave_closed_devices() -> None:
    for seed in range(4):
        check(with_windows(draw_scenario(seed)).without_faults())


def test_a_world_notices_a_core_that_forgets_what_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClosedDevices, "closed_to", lambda self, job: frozenset())
    found = []
    for seed in range(4):
        try:
            check(with_windows(draw_scenario(seed)).without_faults())
        except Violation as violation:
            found.append(str(violation))
    assert any("closed device" in said for said in found)
