"""The record of a switch: rates, sums, stages."""

from __future__ import annotations

from contextlib import suppress

from gpuslice.checkpoint.switch.record import Stages, SwitchRecord

from ...virtual_clock import VirtualClock


def test_rates_are_in_units_of_1e9_bytes_per_second() -> None:
    record = SwitchRecord(1, bytes_copied=3 * 10**9, copy_out_s=2.0, bytes_freed=10**9, copy_in_s=0.5)
    assert (record.gb_per_s_out, record.gb_per_s_in) == (1.5, 2.0)


def test_a_record_without_copies_has_no_rate() -> None:
    assert SwitchRecord(1).as_dict()["gb_per_s_out"] == 0.0


def test_the_sums_are_those_of_the_stages() -> None:
    record = SwitchRecord(1, quiesce_s=1, find_s=2, admit_s=4, copy_out_s=8, publish_s=16, free_s=32)
    assert record.suspend_s == 63
    record = SwitchRecord(1, parked_s=100, fetch_s=1, reserve_s=2, copy_in_s=4)
    assert record.resume_s == 7


def test_stages_are_timed_and_added_up_also_when_they_fail() -> None:
    clock, record = VirtualClock(), SwitchRecord(1)
    stages = Stages(record, clock)
    with stages.stage("reserve_s"):
        clock.advance_to(2)
    with suppress(RuntimeError), stages.stage("reserve_s"):
        clock.advance_to(5)
        raise RuntimeError
    assert record.reserve_s == 5
