"""Jobs that do not do in time what they are told."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Exited,
    Held,
    Kill,
    Launch,
    Moved,
    RankGone,
    Released,
    Submitted,
    WakeAt,
)
from gpuslice.sched_core.lifecycle.restarts import BACK_OFF_S
from gpuslice.sched_core.lifecycle.timeouts import GANG_TIMEOUT_S
from gpuslice.sched_core.policies.fifo import Fifo
from gpuslice.sched_core.policy import Plan, Start, Suspend

from ..driver import PROGRAM, QUANTUM_S, Driver, Scripted, notices, told

TIMEOUT_S = 10.0


def pair(*, kill: bool = False) -> Driver:
    """Jobs a (running, boundary 10) and b (waiting) on one device."""
    driver = Driver()
    spec = JobSpec(
        id="a",
        submit_s=driver.now_s,
        boundary_timeout_s=TIMEOUT_S,
        on_boundary_timeout="kill" if kill else "leave",
    )
    driver.do(Submitted(spec, PROGRAM))
    driver.submit("b")
    for job in "ab":
        driver.hello(job)
    driver.resumed("a")
    driver.progress("a", 10)
    return driver


def test_a_job_that_reaches_no_boundary_is_reported_and_left_running() -> None:
    driver = pair()
    commands = driver.wake()
    assert told(commands, wire.Suspend) == [("a", 0, wire.Suspend(epoch=1, stop_at=11))]
    assert notices(driver.wake(TIMEOUT_S - QUANTUM_S)) == []
    (notice,) = notices(driver.wake(QUANTUM_S))
    assert (notice.what, notice.job, notice.details["order"]) == ("late", "a", "suspend")
    assert (notice.details["boundary"], notice.details["then"]) == (10, "leave")
    job = driver.core.jobs["a"]
    assert (job.lease, job.lateness.missed) == ((0,), 1)
    assert driver.state("b") is JobState.QUEUED
    assert job.state is JobState.RUNNING
    driver.wake()
    assert job.state is JobState.SUSPENDING, "it is tried again when its turn is over"
    commands = driver.parked("a", job.asked.stop_at)
    assert [name for name, _, _ in told(commands, wire.Resume)] == ["b"]
    assert job.lateness.missed == 0


def test_a_job_that_reaches_no_boundary_is_ended_if_its_owner_wants_that() -> None:
    driver = pair(kill=True)
    driver.wake()
    commands = driver.wake(TIMEOUT_S)
    assert [notice.details["then"] for notice in notices(commands)] == ["kill"]
    assert any(isinstance(command, Kill) for command in commands)
    assert driver.state("a") is JobState.FAILED
    assert "reached no boundary within 10 s" in driver.core.jobs["a"].verdict.reason


def being_set_up(*, kill: bool = False) -> Driver:
    """Job a is on the device and has not begun; b waits."""
    driver = Driver(1, Fifo())
    spec = JobSpec(
        id="a",
        submit_s=driver.now_s,
        boundary_timeout_s=TIMEOUT_S,
        on_boundary_timeout="kill" if kill else "leave",
    )
    driver.do(Submitted(spec, PROGRAM))
    driver.submit("b")
    for job in "ab":
        driver.hello(job)
    driver.now_s += 1.0
    assert WakeAt(driver.now_s + TIMEOUT_S) in driver.resumed("a")
    return driver


def test_a_job_that_never_begins_to_train_is_reported_once_and_left_alone() -> None:
    driver = being_set_up()
    assert notices(driver.wake(TIMEOUT_S - 1.0)) == []
    (notice,) = notices(driver.wake(1.0))
    assert (notice.what, notice.job, notice.details["order"]) == ("late", "a", "begin")
    assert (notice.details["after_s"], notice.details["then"]) == (TIMEOUT_S, "leave")
    assert notices(driver.wake(TIMEOUT_S)) == []
    job = driver.core.jobs["a"]
    assert (job.state, job.lateness.missed) == (JobState.RUNNING, 1)
    began = driver.progress("a", 1)
    assert [notice.what for notice in notices(began)] == ["began"]
    assert (job.lateness.late, job.lateness.missed) == (False, 0)


def test_a_job_that_never_begins_to_train_is_ended_if_its_owner_wants_that() -> None:
    driver = being_set_up(kill=True)
    assert any(isinstance(command, Kill) for command in driver.wake(TIMEOUT_S))
    job = driver.core.jobs["a"]
    assert (job.state, job.verdict.reason) == (JobState.FAILED, "it did not begin to train within 10 s")
    driver.do(RankGone("a", 0))
    assert told(driver.do(Exited("a", -15)), wire.Resume)[0][0] == "b"


def test_who_has_begun_is_late_only_when_told_to_stop() -> None:
    driver = pair()
    job = driver.core.jobs["a"]
    driver.do(Held("b"))
    driver.wake(3 * TIMEOUT_S)
    assert (job.state, job.lateness.missed) == (JobState.RUNNING, 0)


def test_whoever_waits_for_a_stuck_job_is_sent_elsewhere() -> None:
    policy = Scripted()
    driver = Driver(2, policy)
    for job in "ac":
        driver.do(Submitted(JobSpec(id=job, submit_s=driver.now_s, boundary_timeout_s=TIMEOUT_S), PROGRAM))
        driver.hello(job)
        driver.resumed(job)
        driver.progress(job, 1)
    driver.submit("b")
    driver.hello("b")
    policy.next = lambda _: Plan([Suspend("a"), Start("b", (0,))])
    driver.wake()
    assert driver.core.jobs["b"].wanted == (0,)
    assert len(notices(driver.wake(TIMEOUT_S))) == 1
    assert (driver.state("a"), driver.core.jobs["b"].wanted) == (JobState.RUNNING, ())
    driver.do(Exited("c", 0))
    driver.do(RankGone("c", 0))
    assert driver.core.jobs["b"].lease == (1,)
    attained_s = driver.core.jobs["a"].executed_at(driver.now_s)
    assert driver.core.jobs["a"].executed_at(driver.now_s + 1.0) == attained_s + 1.0, "it has its device"


def test_what_its_owner_wants_off_stays_told_to_stop() -> None:
    driver = pair()
    driver.do(Held("a"))
    assert [notice.what for notice in notices(driver.wake(TIMEOUT_S))] == ["late"]
    assert driver.state("a") is JobState.SUSPENDING
    assert notices(driver.wake(TIMEOUT_S)) == [], "said once"
    driver.do(Released("a"))
    driver.parked("a", 11)
    assert driver.state("a") in (JobState.SUSPENDED, JobState.RESUMING)


def test_a_job_that_does_not_come_back_is_reported() -> None:
    driver = pair()
    driver.wake()
    driver.parked("a", 11)
    assert driver.state("b") is JobState.STARTING
    (notice,) = notices(driver.wake(60.0))
    assert (notice.job, notice.details["order"]) == ("b", "resume")
    driver.resumed("b")
    assert driver.state("b") in (JobState.RUNNING, JobState.SUSPENDING)


@pytest.mark.parametrize(("timeout_s", "wakes"), [(0.0, []), (TIMEOUT_S, [WakeAt(0.25 + TIMEOUT_S)])])
def test_the_core_asks_to_be_woken_and_never_means_never(timeout_s: float, wakes: list[WakeAt]) -> None:
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=0.0, boundary_timeout_s=timeout_s), PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 1)
    commands = driver.do(Held("a"))
    assert [command for command in commands if isinstance(command, WakeAt)] == wakes
    assert len(notices(driver.wake(10**6))) == len(wakes)


def half_a_gang(*, kill: bool, timeout_s: float = TIMEOUT_S) -> Driver:
    """Rank 1 of gang g has come, rank 0 has not; nobody else is there."""
    driver = Driver(2)
    late = {"boundary_timeout_s": timeout_s, "on_boundary_timeout": "kill" if kill else "leave"}
    driver.do(Submitted(JobSpec(id="g", submit_s=driver.now_s, devices=2, **late), PROGRAM))
    driver.say("g", hello_of(1), 1)
    return driver


def hello_of(rank: int) -> wire.Hello:
    return wire.Hello(version=1, job="g", rank=rank, world_size=2, pid=1 + rank)


@pytest.mark.parametrize(("kill", "limit_s"), [(True, TIMEOUT_S), (False, GANG_TIMEOUT_S)])
def test_a_gang_of_which_a_rank_never_comes_fails_by_name(*, kill: bool, limit_s: float) -> None:
    driver = half_a_gang(kill=kill)
    driver.do(Held("g"))
    driver.do(Released("g"))
    driver.do(Moved("g", ("null:1", "null:0")))
    assert notices(driver.wake(limit_s - 1.0)) == []
    commands = driver.wake(1.0)
    (notice,) = notices(commands)
    assert (notice.what, notice.details["order"], notice.details["then"]) == ("late", "start", "kill")
    assert any(isinstance(command, Kill) for command in commands)
    driver.do(RankGone("g", 1))
    driver.do(Exited("g", -15))
    job = driver.core.jobs["g"]
    assert (job.state, job.verdict.failure) == (JobState.FAILED, "infrastructure")
    assert job.verdict.reason == f"it did not start rank 0 within {limit_s:g} s"


def test_the_core_asks_to_be_woken_for_a_gang_that_is_not_whole() -> None:
    driver = Driver(2)
    driver.submit("g", 2)
    assert WakeAt(driver.now_s + GANG_TIMEOUT_S) in driver.say("g", hello_of(1), 1)


def test_a_gang_that_becomes_whole_is_not_late() -> None:
    driver = half_a_gang(kill=True)
    driver.now_s += TIMEOUT_S - 1.0
    driver.say("g", hello_of(0))
    for rank in range(2):
        driver.resumed("g", rank)
        driver.progress("g", 1, rank)
    assert notices(driver.wake(10 * GANG_TIMEOUT_S)) == []
    assert driver.state("g") is JobState.RUNNING


def test_a_gang_whose_owner_sets_no_limit_may_take_any_time() -> None:
    driver = half_a_gang(kill=True, timeout_s=0.0)
    assert notices(driver.wake(10**6)) == []
    assert driver.state("g") is JobState.QUEUED


def test_every_attempt_of_a_gang_has_its_own_time_to_become_whole() -> None:
    driver = Driver(2)
    driver.do(Submitted(JobSpec(id="g", submit_s=driver.now_s, devices=2, max_restarts=1), PROGRAM))
    driver.say("g", hello_of(1), 1)
    driver.wake(GANG_TIMEOUT_S)
    driver.do(RankGone("g", 1))
    driver.do(Exited("g", -15))
    assert driver.state("g") is JobState.QUEUED
    assert [type(command) for command in driver.wake(BACK_OFF_S)] == [Launch]
    assert notices(driver.wake(2 * GANG_TIMEOUT_S)) == [], "nobody has come, so nobody waits"
    driver.hello("g")
    assert driver.state("g") is JobState.STARTING


def test_a_job_whose_rank_is_gone_while_it_is_to_stop_is_never_late() -> None:
    driver = pair()
    driver.do(Held("a"))
    driver.do(Released("a"))
    driver.do(RankGone("a", 0))
    assert [notice.job for notice in notices(driver.wake(TIMEOUT_S))] == []
    driver.do(Exited("a", 0))
    assert driver.state("a") is JobState.SUCCEEDED
