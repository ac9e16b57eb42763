"""Worlds in which settings change at any moment: it stays safe, nothing is lost, and every job ends."""

from __future__ import annotations

from .changes import with_changes
from .scenario import draw_scenario
from .windows import with_windows
from .world import check


def test_whatever_goes_wrong_settings_may_change() -> None:
    for seed in range(6):
        check(with_changes(draw_scenario(seed)))


def test_devices_may_be_closed_meanwhile() -> None:
    for seed in range(6, 9):
        check(with_changes(with_windows(draw_scenario(seed))))
