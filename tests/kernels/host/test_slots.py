"""Slots of the host."""

from __future__ import annotations

import os

import pytest

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels.host.slots import check_slot
from gpuslice.types import DeviceName


@pytest.mark.parametrize(
    ("device", "slots", "cores", "count"),
    [("cpu", 0, 4, 4), ("cpu:3", 0, 4, 4), ("cpu:7", 8, 4, 8), ("cpu:0", 1, 4, 1), ("cuda:7", 0, 4, 4)],
)
def test_there_is_one_slot_per_core_unless_told_otherwise(
    device: str, slots: int, cores: int, count: int
) -> None:
    assert check_slot(DeviceName.parse(device), slots, cores) == count


@pytest.mark.parametrize(
    ("device", "slots", "cores", "message"),
    [
        ("cpu:4", 0, 4, r"cpu:4 does not exist.*4 slots.*cpu:0 to cpu:3"),
        ("cpu:1", 0, 1, r"cpu:1 does not exist.*1 slot \(use cpu:0\)"),
        ("cpu:2", 2, 64, r"2 slots"),
    ],
)
def test_a_slot_beyond_the_last_is_refused(device: str, slots: int, cores: int, message: str) -> None:
    with pytest.raises(EnvironmentUnusableError, match=message):
        check_slot(DeviceName.parse(device), slots, cores)


def test_the_cores_of_this_process_count() -> None:
    assert check_slot(DeviceName.parse("cpu"), 0) == len(os.sched_getaffinity(0))
