"""What the scheduler is started with, and what its jobs get of that."""

from __future__ import annotations

import pytest

from gpuslice.scheduler_setup import Setup
from gpuslice.types import DeviceName


@pytest.mark.parametrize(
    ("names", "slots"), [("cpu:0 cpu:1", "2"), ("cpu:0 cpu:3", "4"), ("cpu", "1"), ("cuda:0 cuda:1", None)]
)
def test_jobs_know_of_every_slot_that_is_given_away(names: str, slots: str | None) -> None:
    setup = Setup(tuple(DeviceName.parse(name) for name in names.split()))
    assert setup.environ().get("GPUSLICE_CPU_SLOTS") == slots
