"""A new job gets its first slice soon: nobody waits longer for it than one round of quanta (Gandiva)."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice import wire
from gpuslice.sched_core.events import Submitted
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.states import IN_TRANSIT, JobState

from .driver import PROGRAM, QUANTUM_S, Driver


def obey(driver: Driver) -> None:
    """Let every rank do what it was told, until nobody has anything to do."""
    jobs = driver.core.jobs.values()
    while moving := [job for job in jobs if job.state in IN_TRANSIT]:
        for job in moving:
            if job.state is JobState.SUSPENDING:
                driver.parked(job.id, job.stop_at)
            else:
                driver.resumed(job.id)


@settings(max_examples=30, deadline=None)
@given(
    devices=st.integers(1, 3),
    arrivals=st.lists(st.integers(0, 12), min_size=1, max_size=9),
)
def test_nobody_waits_longer_than_a_round_for_the_first_mini_batch(devices: int, arrivals: list[int]) -> None:
    driver = Driver(devices)
    pending = sorted(arrivals)
    for tick in range(40):
        while pending and pending[0] <= tick:
            pending.pop(0)
            name = f"j{len(driver.core.jobs)}"
            driver.do(Submitted(JobSpec(id=name, submit_s=driver.now_s), PROGRAM))
            driver.hello(name)
            obey(driver)
        driver.wake(QUANTUM_S)
        obey(driver)
    jobs = driver.core.jobs.values()
    for job in jobs:
        assert job.first_start_s is not None
        present = sum(other.spec.submit_s <= job.spec.submit_s for other in jobs)
        assert job.first_start_s - job.spec.submit_s <= ceil(present / devices) * QUANTUM_S


@pytest.mark.parametrize("count", [5])
def test_a_crowd_has_all_begun_after_one_round(count: int) -> None:
    driver = Driver()
    for number in range(count):
        driver.submit(f"j{number}")
        driver.hello(f"j{number}")
    obey(driver)
    for _ in range(count - 1):
        driver.wake()
        obey(driver)
    assert all(job.epoch == 1 for job in driver.core.jobs.values()), "one slice each"
    assert {job.state for job in driver.core.jobs.values()} == {JobState.RUNNING, JobState.SUSPENDED}
    assert isinstance(driver.wake()[0].message, wire.Suspend)  # type: ignore[union-attr]
