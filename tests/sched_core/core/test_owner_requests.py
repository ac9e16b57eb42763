"""What owners may ask of the scheduler besides suspend and resume: another place, another weight."""

from __future__ import annotations

from collections import Counter

import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError, UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Adjusted,
    Cancelled,
    Exited,
    Held,
    Launch,
    Moved,
    RankGone,
    Requeued,
    Submitted,
    Weighted,
)
from gpuslice.sched_core.policies.rr import RoundRobin

from ..driver import PROGRAM, QUANTUM_S, Driver, picture, told


def running(driver: Driver, *jobs: str) -> None:
    for job in jobs:
        driver.submit(job)
        driver.hello(job)
        driver.resumed(job)
        driver.progress(job, 10)


def test_a_job_is_moved_to_a_free_device() -> None:
    driver = Driver(2)
    running(driver, "a")
    commands = driver.do(Moved("a", ("null:1",)))
    assert told(commands, wire.Suspend) == [("a", 0, wire.Suspend(epoch=1, stop_at=11))]
    assert told(driver.parked("a", 11), wire.Resume) == [("a", 0, wire.Resume(epoch=2, device="null:1"))]
    driver.resumed("a")
    assert (driver.state("a"), driver.core.jobs["a"].migrations) == (JobState.RUNNING, 1)
    driver.wake()
    assert driver.core.jobs["a"].lease == (1,), "it stays there"
    assert driver.core.jobs["a"].executed_at(driver.now_s) > 0


def test_whoever_holds_the_device_goes_where_the_job_comes_from() -> None:
    driver = Driver(2)
    running(driver, "a", "b")
    commands = driver.do(Moved("a", ("null:1",)))
    assert {job for job, _, _ in told(commands, wire.Suspend)} == {"a", "b"}
    assert told(driver.parked("a", 11), wire.Resume) == [], "b is still there"
    assert sorted(job for job, _, _ in told(driver.parked("b", 11), wire.Resume)) == ["a", "b"]
    assert [driver.core.jobs[job].lease for job in "ab"] == [(1,), (0,)]


def test_the_ranks_of_a_gang_change_places_with_a_single_job() -> None:
    driver = Driver(3)
    driver.submit("g", 2)
    driver.hello("g")
    for rank in (0, 1):
        driver.resumed("g", rank)
        driver.progress("g", 10, rank)
    running(driver, "a")
    driver.do(Moved("g", ("null:2", "null:1")))
    for job, rank in (("g", 0), ("g", 1), ("a", 0)):
        driver.parked(job, 11, rank)
    assert (driver.core.jobs["g"].lease, driver.core.jobs["a"].lease) == ((2, 1), (0,))


def test_a_job_that_waits_goes_there_when_its_turn_comes() -> None:
    driver = Driver(2)
    running(driver, "a", "b")
    driver.submit("c")
    driver.hello("c")
    jobs = driver.core.jobs
    assert driver.do(Moved("c", ("null:0",))) == []
    assert jobs["c"].requested_devices == (0,)
    driver.wake()
    for job in "ab":
        if jobs[job].state is JobState.SUSPENDING:
            driver.parked(job, 11)
    assert (jobs["c"].lease, jobs["c"].requested_devices) == ((0,), ())
    assert jobs["c"].migrations == 0, "it had been nowhere"


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (("null:9",), "no device 'null:9'"),
        (("null:0", "null:1"), "has 1 ranks"),
        ((), "has 1 ranks"),
    ],
)
def test_an_impossible_place_is_refused(devices: tuple[str, ...], why: str) -> None:
    driver = Driver(2)
    running(driver, "a")
    with pytest.raises(UsageError, match=why):
        driver.do(Moved("a", devices))


def test_what_has_ended_has_no_wishes() -> None:
    driver = Driver(2)
    running(driver, "a")
    driver.do(Cancelled("a", "enough"))
    for event in (Moved("a", ("null:1",)), Weighted("a", 2.0)):
        with pytest.raises(IllegalTransitionError, match="by its owner"):
            driver.do(event)


def slices(driver: Driver, rounds: int) -> Counter[str]:
    """Who got how many of the next slices; every switch is carried out."""
    found: Counter[str] = Counter()
    for _ in range(rounds):
        (holder,) = driver.core.state.occupants[0]
        commands = driver.wake()
        if told(commands, wire.Suspend):
            driver.parked(holder, driver.core.jobs[holder].asked.stop_at)
            (holder,) = driver.core.state.occupants[0]
            driver.resumed(holder)
            driver.progress(holder, 1)
        found[holder] += 1
    return found


def test_weights_are_shares_under_round_robin_and_can_be_changed() -> None:
    driver = Driver()
    for job, weight in (("a", 1.5), ("b", 1.0), ("c", 1.0)):
        driver.do(Submitted(JobSpec(id=job, submit_s=driver.now_s, weight=weight), PROGRAM))
        driver.hello(job)
    driver.resumed("a")
    driver.progress("a", 1)
    assert slices(driver, 70) == {"a": 30, "b": 20, "c": 20}
    driver.do(Weighted("b", 3.0))
    driver.do(Weighted("a", 1.0))
    found = slices(driver, 100)
    assert found["b"] == pytest.approx(60, abs=3)
    with pytest.raises(UsageError, match="not above 0"):
        driver.do(Weighted("b", 0.0))


def test_a_gang_is_not_starved_by_jobs_with_turns_of_several_slices() -> None:
    driver = Driver(2)
    running(driver, "a", "b")
    for job in "ab":
        driver.do(Weighted(job, 3.0))
    driver.submit("g", 2)
    driver.hello("g")
    for _ in range(4):
        driver.wake()
        for job in "ab":
            gang = driver.core.jobs[job]
            if gang.state is JobState.SUSPENDING:
                driver.parked(job, gang.asked.stop_at)
    assert driver.state("g") is JobState.STARTING


def ended(driver: Driver, job: str, code: int = 0) -> None:
    driver.do(Exited(job, code))
    for rank in driver.core.jobs[job].there():
        driver.do(RankGone(job, rank.number))


def test_a_job_that_has_ended_is_queued_again_and_has_all_its_restarts() -> None:
    driver = Driver()
    spec = JobSpec(id="a", submit_s=0.0, max_restarts=1)
    driver.do(Submitted(spec, PROGRAM))
    job = driver.core.jobs["a"]
    for code in (0, -9, -9):  # it succeeds; it fails twice, of which one is made good
        driver.hello("a")
        driver.resumed("a")
        driver.progress("a", 3)
        ended(driver, "a", code)
        if job.state is JobState.QUEUED:
            driver.wake(100.0)
        elif code == 0:
            launches = [one for one in driver.do(Requeued("a")) if isinstance(one, Launch)]
            assert [one.attempt for one in launches] == [1]
            assert (job.state, job.failures, job.state_nodes) == (JobState.QUEUED, 0, ())
    assert (job.state, job.failures) == (JobState.FAILED, 1)
    driver.do(Requeued("a"))
    assert (job.failures, job.command.anew, job.state_nodes) == (0, False, (0,))
    ended(driver, "a", -9)
    driver.do(Cancelled("a", "no"))
    driver.do(Requeued("a", fresh=True))
    assert (job.failures, job.command.anew, job.state_nodes) == (0, True, ())
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 1)
    assert job.lease
    assert picture(driver.core) == picture(driver.replayed(RoundRobin(quantum_s=QUANTUM_S)))


def test_a_held_job_that_was_cancelled_is_requeued_without_being_held() -> None:
    driver = Driver()
    driver.submit("a")
    driver.do(Held("a"))
    driver.do(Cancelled("a", "no"))
    ended(driver, "a", -15)
    driver.do(Requeued("a"))
    assert not driver.core.jobs["a"].held
    driver.hello("a")
    assert driver.core.jobs["a"].lease


def test_a_job_that_has_not_ended_or_still_has_processes_is_not_requeued() -> None:
    driver = Driver()
    driver.running_pair()
    with pytest.raises(UsageError, match="job a has not ended, it is running") as error:
        driver.do(Requeued("a"))
    assert error.value.remedy == "end it first: `gpuslice cancel a`"
    driver.do(Cancelled("a", "no"))
    with pytest.raises(UsageError, match="processes of job a are still ending"):
        driver.do(Requeued("a"))
    ended(driver, "a", -15)
    driver.do(Requeued("a"))
    assert driver.state("a") is JobState.QUEUED
    assert driver.core.jobs["b"].lease


def test_a_waiting_job_with_a_new_priority_gets_the_device() -> None:
    driver = Driver()
    driver.running_pair()
    driver.do(Adjusted("b", priority=1))
    assert told(driver.parked("a", driver.core.jobs["a"].asked.stop_at), wire.Resume)[0][0] == "b"
    driver.resumed("b")
    driver.wake(5.0)
    assert driver.core.jobs["b"].lease, "a has a lower priority"
    driver.do(Adjusted("b", priority=0))
    assert driver.core.jobs["b"].spec.priority == 0
    assert picture(driver.core) == picture(driver.replayed(RoundRobin(quantum_s=QUANTUM_S)))


def test_a_running_job_is_given_a_time_limit_and_another_weight() -> None:
    driver = Driver()
    running(driver, "a")
    driver.do(Adjusted("a", time_limit_s=60.0, weight=2.0))
    spec = driver.core.jobs["a"].spec
    assert (spec.time_limit_s, spec.weight, spec.priority) == (60.0, 2.0, 0)
    driver.wake(61.0)
    assert driver.state("a") is JobState.FAILED
    with pytest.raises(UsageError, match="job a has ended"):
        driver.do(Adjusted("a", weight=1.0))
