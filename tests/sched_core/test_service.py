"""Attained service: time on devices in which a job trains, and what becomes of the time before that."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.accounts import SETUP_AT_MOST_S
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Exited, Held, RankGone, Submitted
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Migrate, Plan

from .driver import PROGRAM, Driver, Scripted, notices, picture, refused, told


def queues(threshold_s: float = 5.0) -> Driver:
    return Driver(1, make_policy("2das", {"thresholds": (threshold_s,)}))


def enter(driver: Driver, *jobs: str) -> None:
    for job in jobs:
        driver.submit(job)
        driver.hello(job)


def replayed(driver: Driver) -> Core:
    return driver.replayed(make_policy("2das", {"thresholds": (5.0,)}))


def test_what_comes_before_the_first_boundary_is_no_service() -> None:
    driver = queues()
    enter(driver, "a")
    driver.resumed("a")
    job = driver.core.jobs["a"]
    driver.now_s += 30.0
    assert driver.progress("a", 0) == [], "it is still importing"
    assert (job.service_at(driver.now_s), job.setup_at(driver.now_s)) == (0.0, 30.0)
    (notice,) = notices(driver.progress("a", 1))
    assert (notice.what, notice.job, notice.details) == ("began", "a", {"setup_s": 30.0})
    driver.now_s += 2.0
    assert notices(driver.progress("a", 9)) == [], "said once"
    assert (job.service_at(driver.now_s), job.setup_at(driver.now_s)) == (2.0, 30.0)
    assert picture(replayed(driver)) == picture(driver.core)


def test_a_queue_is_left_after_so_much_training_however_long_the_set_up_was() -> None:
    driver = queues(5.0)
    enter(driver, "a", "b")
    driver.resumed("a")
    driver.wake(20.0)
    assert driver.state("a") is JobState.RUNNING
    driver.progress("a", 1)
    driver.wake(4.9)
    assert driver.core.allocation.planning.level(driver.core.jobs["a"]) == 0
    assert told(driver.wake(0.1), wire.Suspend) != []
    assert driver.core.allocation.planning.level(driver.core.jobs["a"]) == 1


def test_a_queue_is_left_in_time_by_a_job_that_was_long_on_its_way_back() -> None:
    driver = queues(5.0)
    enter(driver, "a", "b")
    driver.wake(10.0)
    driver.resumed("a")
    driver.progress("a", 1)
    assert driver.core.allocation.planning.wake_s == pytest.approx(driver.now_s + 5.0)
    assert told(driver.wake(5.0), wire.Suspend) != []


def test_a_job_that_never_reaches_a_boundary_does_not_hold_its_devices_for_nothing() -> None:
    driver = queues(5.0)
    enter(driver, "a", "b")
    driver.resumed("a")
    driver.wake(SETUP_AT_MOST_S + 4.0)
    assert driver.core.jobs["a"].service_at(driver.now_s) == pytest.approx(4.0)
    driver.wake(1.0)
    assert driver.state("a") is JobState.SUSPENDING
    driver.progress("a", 1)
    assert driver.core.jobs["a"].setup_at(driver.now_s) == SETUP_AT_MOST_S


def test_the_first_slice_has_a_mini_batch_in_it() -> None:
    driver = Driver()
    enter(driver, "a", "b")
    driver.resumed("a")
    assert told(driver.do(Held("a")), wire.Suspend) == [("a", 0, wire.Suspend(epoch=1, stop_at=2))]


def test_the_set_up_of_every_attempt_is_shown_and_none_counts() -> None:
    driver = queues()
    driver.do(Submitted(JobSpec(id="a", submit_s=driver.now_s, max_restarts=1), PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    driver.now_s += 3.0
    driver.progress("a", 1)
    driver.now_s += 1.0
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", -9))
    driver.wake(1.0)
    driver.hello("a")
    driver.resumed("a")
    driver.now_s += 4.0
    job = driver.core.jobs["a"]
    assert (job.attempt, job.setup_at(driver.now_s), job.service_at(driver.now_s)) == (1, 7.0, 1.0)
    driver.do(Cancelled("a", "enough"))
    assert job.verdict.ended_s is not None
    assert job.setup_at(job.verdict.ended_s) == 7.0
    assert picture(replayed(driver)) == picture(driver.core)


def test_the_time_between_refusals_to_leave_counts() -> None:
    policy = Scripted()
    driver = Driver(2, policy)
    enter(driver, "a")
    driver.resumed("a")
    driver.progress("a", 1)
    job = driver.core.jobs["a"]
    policy.next = lambda _: Plan([Migrate("a", (1,))])
    driver.core.state.plan_due = True
    driver.wake(1.0)
    assert job.service_at(driver.now_s) == 1.0
    for _ in range(3):
        driver.say("a", refused(1, 1, running=True))
        assert driver.state("a") is JobState.RUNNING
        driver.wake(4.0)
        assert driver.state("a") is JobState.SUSPENDING
    assert job.service_at(driver.now_s) == 13.0
    driver.parked("a", job.asked.stop_at)
    driver.now_s += 5.0
    driver.resumed("a")
    assert job.lease == (1,)
    assert job.service_at(driver.now_s + 1.0) == 14.0


def test_the_time_for_which_a_job_lends_its_devices_does_not_count() -> None:
    driver = queues()
    enter(driver, "a")
    driver.do(Submitted(JobSpec(id="b", submit_s=driver.now_s, trial_batches=3), PROGRAM))
    driver.hello("b")
    job = driver.core.jobs["a"]
    assert (job.state, job.lent) == (JobState.STARTING, True)
    driver.resumed("a")
    driver.progress("a", 1)
    driver.now_s += 1.0
    driver.parked("a", job.asked.stop_at)
    driver.resumed("b")
    driver.wake(50.0)
    assert driver.state("b") is JobState.RUNNING
    assert job.service_at(driver.now_s) == 1.0, "from its first boundary until it left"
