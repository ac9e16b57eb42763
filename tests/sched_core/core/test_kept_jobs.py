"""Jobs that were kept are taken over into a new core: all that is known of them goes along, exactly once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.core.kept_jobs import describe
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.facts import Keep
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.kept import KeptJobs, Tally
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Adjusted,
    ArraySubmitted,
    Cancelled,
    Drained,
    Exited,
    Held,
    Kept,
    Launch,
    Paused,
    Point,
    RankGone,
    Released,
    Reserved,
    Submitted,
    TakenOver,
    Unreserved,
)
from gpuslice.sched_core.policies.las import LeastAttained
from gpuslice.sched_core.policies.rr import RoundRobin

from ..driver import PROGRAM, QUANTUM_S, Driver, notices, picture
from .test_keeping import all_train, end_processes, kept_at_random, kept_pair, of

UNIX_S = 1e9


def written(driver: Driver) -> KeptJobs:
    """Return the description of the driver's jobs, as it comes back from a file."""
    found = msgspec.json.encode(describe(driver.core.state, driver.now_s))
    return msgspec.json.decode(found, type=KeptJobs)


def taken_over(former: Driver, after_s: float = 5.0, **options: Any) -> Driver:
    """Return a driver of a new core that has taken the jobs of ``former`` over."""
    driver = Driver(**options)
    driver.now_s = former.now_s + after_s
    driver.do(TakenOver(written(former), UNIX_S))
    return driver


def of_job(job: Gang) -> dict[str, Any]:
    sums = {name: getattr(job, name) for name in Tally.__struct_fields__}
    return {**sums, "state": job.state, "steps": job.steps_so_far, "failures": job.failures}


def test_who_waits_for_an_array_need_not_know_which_of_its_jobs_had_failed() -> None:
    former = Driver(1)
    points = tuple(Point(f"s-{number}", PROGRAM.argv) for number in range(2))
    former.do(ArraySubmitted(JobSpec(id="s", submit_s=former.now_s, hold=True), PROGRAM, points))
    former.do(Submitted(JobSpec(id="b", submit_s=former.now_s, after=("s:failed",)), PROGRAM))
    former.do(Released("s-0"))
    former.hello("s-0")
    former.resumed("s-0")
    former.do(RankGone("s-0", 0, pid=1))
    former.do(Exited("s-0", 1, "ValueError: no"))
    driver = taken_over(former)
    assert list(driver.core.jobs) == ["s-1", "b"]
    driver.do(Kept(None))
    driver.do(Cancelled("s-1", "enough"))
    assert driver.core.jobs["b"].command.launched


def test_the_same_is_known_of_each_job() -> None:
    former = kept_pair()
    former.do(Held("b"))
    former.do(Adjusted("a", weight=3.0, priority=2))
    driver = taken_over(former)
    before = {name: of_job(job) for name, job in former.core.jobs.items()}
    for name, job in driver.core.jobs.items():
        former.core.jobs[name].book(driver.now_s)
        expected = {**before[name], "held_s": former.core.jobs[name].held_at(former.now_s)}
        found = of_job(job)
        assert {key: found[key] for key in expected} == pytest.approx(expected)
        assert job.held_at(driver.now_s) == former.core.jobs[name].held_at(driver.now_s)
        assert job.spec == former.core.jobs[name].spec
    assert driver.core.jobs["a"].steps_so_far == 11
    assert driver.core.jobs["a"].spec.priority == 2


def test_they_stay_kept_until_they_are_released_and_a_held_one_longer() -> None:
    former = kept_pair()
    former.do(Held("b"))
    driver = taken_over(former, policy=LeastAttained(), device_count=2)
    assert not of(driver.wake(), Launch)
    assert of(driver.do(Kept(None)), Launch) == ["a"]
    assert of(driver.do(Released("b")), Launch) == ["b"]


@pytest.mark.parametrize("seed", range(10))
def test_whenever_jobs_are_kept_all_of_them_train_again_elsewhere(seed: int) -> None:
    former, draw = kept_at_random(100 + seed)
    attempts = {name: job.attempt for name, job in former.core.jobs.items()}
    driver = taken_over(former, policy=LeastAttained(), device_count=draw.randrange(1, 4))
    driver.do(Kept(None))
    all_train(driver, draw)
    assert {name: job.attempt for name, job in driver.core.jobs.items()} == attempts


def test_the_journal_gives_the_same_core_again() -> None:
    driver = taken_over(kept_pair())
    driver.do(Kept(None))
    assert picture(driver.replayed(RoundRobin(quantum_s=QUANTUM_S))) == picture(driver.core)


def test_only_conditions_that_are_not_fulfilled_go_along() -> None:
    former = Driver()
    for name, after in (("a", ()), ("b", ()), ("c", ("a:any", "b"))):
        former.do(Submitted(JobSpec(id=name, submit_s=0.0, after=after), PROGRAM))
    former.hello("a")
    former.resumed("a")
    end_processes(former, "a")
    assert former.state("a") is JobState.FAILED
    former.do(Kept(Keep.PARK))
    former.do(Kept(Keep.END))
    for name, job in former.core.jobs.items():
        if not job.processes_gone:
            end_processes(former, name)
    driver = taken_over(former)
    assert list(driver.core.jobs) == ["b", "c"]
    assert driver.core.jobs["c"].conditions.after == ("b",)
    driver.do(Kept(None))
    assert driver.core.jobs["b"].command.launched
    assert not driver.core.jobs["c"].command.launched


def test_who_asks_for_more_devices_than_there_are_is_named_and_nothing_is_changed() -> None:
    former = Driver(2)
    former.submit("one")
    former.submit("two", 2)
    former.do(Kept(Keep.END))
    for name in ("one", "two"):
        if not former.core.jobs[name].processes_gone:
            end_processes(former, name)
    driver = Driver(1)
    with pytest.raises(UsageError, match="job two asks for 2 devices of 1"):
        driver.core.handle(TakenOver(written(former), UNIX_S), 9.0)
    assert not driver.core.jobs


def test_jobs_are_taken_over_once() -> None:
    driver = taken_over(kept_pair())
    with pytest.raises(UsageError, match="there are jobs already"):
        driver.core.handle(TakenOver(written(kept_pair()), UNIX_S), 9.0)
    assert list(driver.core.jobs) == ["a", "b"]


def test_pauses_drains_and_reservations_go_along_for_devices_that_are_there() -> None:
    former = Driver(3)
    former.do(Paused(("null:0",), UNIX_S, UNIX_S + 100.0))
    former.do(Drained(("null:1", "null:2")))
    former.do(Reserved("r1", ("null:2",), UNIX_S, UNIX_S, UNIX_S + 50.0, "t"))
    former.do(Reserved("r2", ("null:0",), UNIX_S, UNIX_S + 500.0, UNIX_S + 600.0, "t"))
    former.do(Unreserved("r2"))
    former.do(Reserved("r3", ("null:0",), UNIX_S, UNIX_S + 500.0, UNIX_S + 600.0, "t"))
    driver = Driver(2)
    driver.now_s = 10.0
    told = notices(driver.do(TakenOver(written(former), UNIX_S + 10.0)))
    closed = driver.core.state.closed
    assert dict(closed.paused) == {0: UNIX_S + 100.0}
    assert closed.drained == {1}
    assert [one.name for one in closed.reservations] == ["r3"]
    assert closed.next_name == "r4"
    assert [one.details["devices"] for one in told if one.what == "not_taken_over"] == ["null:2", "null:2"]
    driver.wake(91.0)
    assert not closed.paused


def test_a_time_limit_goes_on_from_what_was_used() -> None:
    former = Driver()
    former.do(Submitted(JobSpec(id="a", submit_s=0.0, time_limit_s=50.0), PROGRAM))
    former.hello("a")
    former.resumed("a")
    former.progress("a", 1)
    former.wake(30.0)
    former.do(Kept(Keep.PARK))
    former.parked("a", former.core.jobs["a"].asked.stop_at)
    former.do(Kept(Keep.END))
    end_processes(former, "a")
    driver = taken_over(former, after_s=1000.0)
    driver.do(Kept(None))
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 2)
    driver.wake(19.0)
    assert not driver.state("a").ended
    driver.wake(2.0)
    end_processes(driver, "a")
    assert driver.core.jobs["a"].verdict.failure == "time_limit"
