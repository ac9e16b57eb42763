"""Clocks move forward only."""

from __future__ import annotations

import pytest

from gpuslice.clock import ContinuedClock, MonotonicClock

from ..virtual_clock import VirtualClock


def test_virtual_time_moves_only_when_told() -> None:
    clock = VirtualClock(5.0)
    assert clock.now() == 5.0
    clock.advance_to(7.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance_to(7.0)
    assert clock.now() == 7.5


def test_real_time_never_goes_back() -> None:
    clock = MonotonicClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)


def test_a_continued_clock_goes_on_after_the_machine_started_anew() -> None:
    clock, machine = ContinuedClock(), MonotonicClock()
    later_s = machine.now() + 1000.0
    clock.continue_from(later_s)
    assert clock.now() >= later_s
    clock.continue_from(0.0)
    assert clock.now() < later_s, "the same machine is ahead by itself"
