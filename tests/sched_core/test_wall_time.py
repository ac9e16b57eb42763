"""The time of day as the core knows it, and what tells it."""

from __future__ import annotations

from math import inf

from gpuslice.sched_core.lifecycle.events import Clocked
from gpuslice.sched_core.live.time_of_day import TimeOfDay
from gpuslice.sched_core.wall_time import WallTime

from .driver import Driver


def test_a_moment_is_never_while_the_time_of_day_is_not_known() -> None:
    wall = WallTime()
    assert wall.is_off(1e9, 5.0)
    assert wall.moment(1e9) == inf
    wall.read(1e9, 5.0)
    assert not wall.is_off(1e9 + 60.0, 65.0)
    assert wall.moment(1e9 + 60.0) == 65.0
    assert wall.is_off(1e9 + 600.0, 65.0), "the machine has slept"


def test_the_core_is_told_the_time_of_day_when_it_is_needed_and_when_it_changes() -> None:
    driver, told, ahead_s = Driver(), list[Clocked](), 1e9

    def occur(event: Clocked) -> None:
        told.append(event)
        driver.do(event)

    shell = TimeOfDay(driver.core, lambda: driver.now_s, occur, lambda: driver.now_s + ahead_s)
    shell.look()
    assert (told, shell.due_s()) == ([], None)
    shell.tell()
    shell.tell()
    driver.now_s += 100.0
    shell.look()
    assert told == [Clocked(1e9 + 0.25)]
    assert shell.due_s() == driver.now_s + 60.0
    ahead_s += 3600.0
    shell.look()
    assert told[1:] == [Clocked(1e9 + 3700.25)]
