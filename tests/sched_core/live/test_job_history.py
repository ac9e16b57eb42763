"""The job history: what switches cost, and which slices there were. That it always agrees with the core, the
driver checks after every event of every test."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Exited, RankGone, Requeued, Submitted
from gpuslice.sched_core.live.job_history import RECENT

from ..driver import PROGRAM, Driver

OUT = {"copy_out_s": 0.25, "free_s": 0.05}
IN = {"parked_s": 7.0, "reserve_s": 0.05, "copy_in_s": 0.15}


def park(driver: Driver, job: str, boundary: int, rank: int = 0) -> wire.Suspended:
    epoch = driver.core.jobs[job].epoch
    message = wire.Suspended(epoch=epoch, boundary=boundary, step=boundary, nbytes=100, stages_s=OUT)
    driver.say(job, message, rank)
    return message


def resume(driver: Driver, job: str, boundary: int, rank: int = 0, **stages_s: float) -> None:
    epoch = driver.core.jobs[job].epoch
    driver.say(job, wire.Resumed(epoch=epoch, boundary=boundary, stages_s=stages_s or IN), rank)


def test_blackout_is_every_stage_but_the_time_parked() -> None:
    driver = Driver()
    driver.running_pair()
    account = driver.job_history.accounts["a"]
    driver.wake()
    message = park(driver, "a", 11)
    driver.resumed("b")
    driver.progress("b", 1)
    driver.now_s += 0.1
    driver.wake()
    driver.parked("b", 1)
    assert (account.switches, account.blackout_s) == (0, 0.0), "it is not back yet"
    driver.say("a", message)  # again, as after a Hello
    resume(driver, "a", 11)
    assert driver.state("a") is JobState.RUNNING
    assert account.switches == 1
    assert account.blackout_s == pytest.approx(0.5)
    assert driver.job_history.accounts["b"].switches == 0


def test_a_first_slice_is_no_switch() -> None:
    driver = Driver()
    driver.running_pair()
    account = driver.job_history.accounts["a"]
    assert (account.switches, account.blackout_s) == (0, 0.0)
    assert [(one.devices, one.since_s, one.until_s) for one in account.slices] == [((0,), 0.25, None)]


def test_a_gang_is_as_slow_as_its_slowest_rank() -> None:
    driver = Driver(2)
    driver.running_gang(2)
    driver.wake()
    stop_at = driver.core.jobs["g"].asked.stop_at
    for rank in range(2):
        park(driver, "g", stop_at, rank)
    for rank in range(2):
        driver.resumed("h", rank)
        driver.progress("h", 1, rank)
    driver.wake()
    for rank in range(2):
        driver.parked("h", driver.core.jobs["h"].asked.stop_at, rank)
    resume(driver, "g", stop_at, 0)
    resume(driver, "g", stop_at, 1, copy_in_s=1.7)
    account = driver.job_history.accounts["g"]
    assert account.switches == 1
    assert account.blackout_s == pytest.approx(2.0)


def test_only_the_last_slices_are_kept() -> None:
    driver = Driver()
    driver.running_pair()
    boundary = 10
    for _ in range(RECENT + 2):
        for job, other in ("ab", "ba"):
            driver.wake()
            boundary += 1
            driver.parked(job, boundary)
            driver.resumed(other)
            driver.progress(other, boundary)
    slices = driver.job_history.accounts["a"].slices
    assert len(slices) == RECENT
    assert all(one.until_s is not None and one.until_s > one.since_s for one in list(slices)[:-1])
    assert slices[-1].until_s is None


def test_a_job_told_to_stop_when_its_last_rank_has_left_is_noted_though_nobody_is_told() -> None:
    driver = Driver()
    driver.running_pair()
    driver.say("a", wire.Bye(epoch=1, boundary=11, step=11))
    driver.wake()
    assert driver.job_history.accounts["a"].phase.state is driver.state("a") is JobState.SUSPENDING


def test_attempts_have_their_times_and_how_they_ended() -> None:
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=0.0, max_restarts=1), PROGRAM))
    for code in (-9, 3):
        driver.hello("a")
        driver.resumed("a")
        driver.progress("a", 3)
        driver.now_s += 2.0
        driver.do(RankGone("a", 0))
        driver.do(Exited("a", code, "ValueError: no"))
        driver.wake(100.0)
    first, second = driver.job_history.accounts["a"].attempts
    assert (first.number, first.since_s, first.until_s, first.exit_code) == (1, 0.25, 2.25, -9)
    assert (second.number, second.since_s, second.exit_code) == (2, 102.25, 3)
    assert first.failure.startswith("infrastructure: ")
    assert second.failure == "user: ValueError: no"
    driver.do(Requeued("a"))
    assert [one.number for one in driver.job_history.accounts["a"].attempts] == [1, 2, 3]
    assert driver.job_history.accounts["a"].attempts[2].until_s is None
