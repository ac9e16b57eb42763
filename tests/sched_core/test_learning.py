"""What a live scheduler learns of how much service jobs need, and Gittins' order that follows from it."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.jobs.estimates import ENOUGH, Estimates
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Exited, RankGone
from gpuslice.sched_core.policies.registry import make_policy

from .driver import Driver, picture, told

OPTIONS = {"thresholds": (3600.0,)}


def ended(number: int, service_s: float) -> Job:
    job = Job(JobSpec(id=f"j{number}", submit_s=0.0), number)
    job.service_s = service_s
    return job


def test_a_sample_is_made_of_enough_jobs_and_renewed_when_half_as_many_more_have_ended() -> None:
    known = Estimates()
    editions = []
    for number in range(2 * ENOUGH):
        known.learn(ended(number, float(number + 1)))
        editions.append((known.edition(), len(known.services())))
    assert editions[ENOUGH - 2] == (0, 0)
    assert editions[ENOUGH - 1] == editions[ENOUGH] == (1, ENOUGH)
    assert editions[-1] == (2, ENOUGH + ENOUGH // 2)
    assert list(known.services()) == [float(number + 1) for number in range(ENOUGH + ENOUGH // 2)]


def test_only_the_newest_jobs_count_and_none_that_did_not_train() -> None:
    known = Estimates()
    for number in range(5000):
        known.learn(ended(number, number if number % 2 else 0.0))
    assert len(known.services()) == 1000
    assert 0.0 not in known.services()
    assert min(known.services()) > 1000


def train(driver: Driver, job: str, service_s: float) -> None:
    driver.submit(job)
    driver.hello(job)
    driver.resumed(job)
    driver.progress(job, 1)
    driver.now_s += service_s


def end(driver: Driver, job: str) -> None:
    driver.do(Exited(job, 0))
    driver.do(RankGone(job, 0))


@pytest.mark.parametrize("past", [0, ENOUGH])
def test_gittins_knows_better_after_enough_jobs_have_ended(past: int) -> None:
    """All took about 1,600 s: one at 1,500 s is nearly through. Of the shipped sample it is a long one."""
    driver = Driver(1, make_policy("gittins", OPTIONS))
    for number in range(past):
        train(driver, f"past{number}", 1600.0 + 0.01 * number)
        end(driver, f"past{number}")
    for number in range(ENOUGH):  # what was cancelled says nothing of how long jobs are
        train(driver, f"cancelled{number}", 1.0)
        driver.do(Cancelled(f"cancelled{number}", "enough"))
        end(driver, f"cancelled{number}")
    train(driver, "old", 1500.0)
    driver.submit("new")
    suspends = told(driver.hello("new"), wire.Suspend)
    assert driver.state("old") is (JobState.RUNNING if past else JobState.SUSPENDING)
    assert bool(suspends) is not bool(past)
    assert picture(driver.replayed(make_policy("gittins", OPTIONS))) == picture(driver.core)


def test_jobs_that_wait_are_ranked_anew_with_a_new_sample() -> None:
    driver = Driver(1, make_policy("gittins", OPTIONS))
    for number in range(ENOUGH - 1):
        train(driver, f"past{number}", 1600.0)
        end(driver, f"past{number}")
    train(driver, "old", 1500.0)
    driver.submit("last")
    driver.hello("last")
    driver.parked("old", 2)
    driver.resumed("last")
    driver.progress("last", 1)
    driver.submit("new")
    driver.hello("new")
    driver.now_s += 1600.0
    end(driver, "last")
    assert driver.core.jobs["old"].lease == (0,), "by the shipped sample it it would be the turn of new"
