"""Short weeks of a box with few people; ``./x soak week`` has whole ones with thirty."""

from __future__ import annotations

import pytest

from .reboot import Disk
from .record import Violation
from .week import check_week, draw_week


@pytest.mark.parametrize("seed", range(2))
def test_no_job_is_lost_and_none_runs_outside_its_time(seed: int) -> None:
    world = check_week(draw_week(seed, days=1, people=6))
    assert [entry for entry in world.ground.record.entries if entry.what == "the machine is on"]


def test_where_nothing_goes_wrong_all_leave_closed_devices_in_time() -> None:
    check_week(draw_week(3, days=1, people=6).without_faults())


def test_a_week_notices_a_disk_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "store", lambda self, kept: None)
    found = []
    for seed in range(2):
        try:
            check_week(draw_week(seed, days=1, people=6))
        except Violation as violation:
            found.append(str(violation))
    assert any("the only copy of a state was dropped" in said for said in found)
