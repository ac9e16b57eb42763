"""What the scheduler is started with, and what its jobs get of that."""

from __future__ import annotations

import pytest

from gpuslice.daemon import daemon
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.types import DeviceName


@pytest.mark.parametrize(
    ("names", "slots"), [("cpu:0 cpu:1", "2"), ("cpu:0 cpu:3", "4"), ("cpu", "1"), ("cuda:0 cuda:1", None)]
)
def test_jobs_know_of_every_slot_that_is_given_away(names: str, slots: str | None) -> None:
    setup = Setup(tuple(DeviceName.parse(name) for name in names.split()))
    assert setup.environ().get("GPUSLICE_CPU_SLOTS") == slots


@pytest.mark.parametrize(
    ("mebibytes", "present", "jobs"),
    [
        (100_000, None, 4),
        (1024, None, 2),
        (1023, None, 1),
        (100, None, 0),
        (1600, 2, 2),
        (1800, 2, 3),
        (1600, 4, 3),
        (-5, 4, 0),
    ],
)
def test_so_many_jobs_wait_beside_those_that_run_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, mebibytes: int, present: int | None, jobs: int
) -> None:
    monkeypatch.setattr(daemon, "available_bytes", lambda: mebibytes << 20)
    assert daemon._affordable(4, present) == jobs
