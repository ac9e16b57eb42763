"""Worlds in which settings change at any moment: it stays safe, nothing is lost, and every job ends."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.jobs.closed_devices import ClosedDevices

from .changes import with_changes
from .record import Violation
from .scenario import draw_scenario
from .windows import with_windows
from .world import check


def test_whatever_goes_wrong_settings_may_change() -> None:
    for seed in range(6):
        check(with_changes(draw_scenario(seed)))


def test_devices_may_be_closed_meanwhile() -> None:
    for seed in range(6, 9):
        check(with_changes(with_windows(draw_scenario(seed))))


def test_where_nothing_goes_wrong_all_leave_removed_devices() -> None:
    for seed in (8, 10, 12):  # with changes of devices
        check(with_changes(draw_scenario(seed)).without_faults())


def test_a_world_notices_a_core_that_forgets_what_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClosedDevices, "shut", frozenset())
    found = []
    for seed in (8, 10):
        try:
            check(with_changes(draw_scenario(seed)).without_faults())
        except Violation as violation:
            found.append(str(violation))
    assert any("closed device" in said for said in found)
