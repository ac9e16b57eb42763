"""A new job gets its first slice soon: nobody waits longer for it than one round of quanta (Gandiva)."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState
from gpuslice.sched_core.lifecycle.events import Submitted
from gpuslice.sched_core.policies.registry import make_policy

from .driver import PROGRAM, QUANTUM_S, Driver, told

#: Policies that promise it, and their settings.
PROMISING: dict[str, dict[str, object]] = {
    "2das": {"first_slice_s": QUANTUM_S},
    "gittins": {"first_slice_s": QUANTUM_S},
    "las": {"quantum_s": QUANTUM_S},
    "rr": {"quantum_s": QUANTUM_S},
    "srtf": {},
    "srsf": {},
}


def obey(driver: Driver) -> None:
    """Let every rank do what it was told, until nobody has anything to do."""
    jobs = driver.core.jobs.values()
    while moving := [job for job in jobs if job.state in IN_TRANSIT]:
        for job in moving:
            if job.state is JobState.SUSPENDING:
                driver.parked(job.id, job.asked.stop_at)
            else:
                driver.resumed(job.id)
                driver.progress(job.id, job.ranks[0].boundary + 1)


def live(driver: Driver, until_s: float) -> None:
    """Wake the core whenever it wants that."""
    while (wake_s := driver.core.allocation.planning.wake_s) is not None and wake_s <= until_s:
        driver.wake(max(0.0, wake_s - driver.now_s))
        obey(driver)
        assert driver.core.allocation.planning.wake_s != wake_s
    driver.now_s = until_s


@pytest.mark.parametrize("policy", sorted(PROMISING))
@settings(max_examples=12, deadline=None)
@given(devices=st.integers(1, 3), arrivals_s=st.lists(st.integers(0, 48), min_size=1, max_size=9))
def test_nobody_waits_longer_than_a_round_for_the_first_mini_batch(
    policy: str, devices: int, arrivals_s: list[int]
) -> None:
    driver = Driver(devices, make_policy(policy, PROMISING[policy]))
    jobs = driver.core.jobs
    for arrival in sorted(arrivals_s):
        live(driver, 0.25 + 0.25 * arrival)
        spec = JobSpec(id=f"j{len(jobs)}", submit_s=driver.now_s, steps=100_000)
        driver.do(Submitted(spec, PROGRAM))
        driver.hello(spec.id)
        obey(driver)
    live(driver, 40.0)
    for job in jobs.values():
        assert job.first_start_s is not None
        present = sum(other.spec.submit_s <= job.spec.submit_s for other in jobs.values())
        assert job.first_start_s - job.spec.submit_s <= ceil(present / devices) * QUANTUM_S


def test_without_a_first_slice_a_queue_is_served_in_order() -> None:
    driver = Driver(1, make_policy("2das", {"thresholds": (10.0,)}))
    for name in ("a", "b"):
        driver.submit(name)
        driver.hello(name)
    obey(driver)
    live(driver, 9.0)
    assert driver.core.jobs["b"].first_start_s is None
    live(driver, 11.0)
    assert driver.core.jobs["b"].first_start_s == 10.25


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


def three() -> Driver:
    """Jobs a, b and c in the line of one device; a has been told to come to it."""
    driver = Driver()
    for name in "abc":
        driver.submit(name)
        driver.hello(name)
    return driver


def test_a_slice_of_round_robin_is_one_of_training() -> None:
    driver = three()
    driver.resumed("a")
    for _ in range(3):
        assert told(driver.wake(), wire.Suspend) == [], "it is still setting up"
    driver.progress("a", 1)
    driver.now_s += 0.5
    assert told(driver.wake(0.5), wire.Suspend) != []


def test_nobodys_turn_passes_while_the_device_is_not_free_yet() -> None:
    driver = three()
    driver.resumed("a")
    driver.progress("a", 1)
    assert told(driver.wake(), wire.Suspend) != []
    driver.wake(5 * QUANTUM_S)
    assert [job for job, *_ in told(driver.parked("a", 2), wire.Resume)] == ["b"]
