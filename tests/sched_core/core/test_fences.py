"""What is said of an earlier attempt is known, and changes nothing."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError, InvariantError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Command as CommandFacts
from gpuslice.sched_core.jobs.command import Purpose, Stage
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Command,
    Event,
    Exited,
    Kill,
    Launch,
    RankGone,
    Submitted,
)

from ..driver import PROGRAM, Driver, picture


def hello(attempt: int | None, pid: int) -> wire.Hello:
    return wire.Hello(version=1, job="a", rank=0, world_size=1, pid=pid, attempt=attempt)


def second_attempt() -> Driver:
    """Return a driver whose job runs in its second attempt, in process 2. The first was process 1."""
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=0.0, devices=1, max_restarts=2), PROGRAM))
    driver.say("a", hello(0, 1))
    driver.resumed("a")
    driver.progress("a", 3)
    driver.do(RankGone("a", 0, pid=1, attempt=0))
    driver.do(Exited("a", -9, attempt=0))
    (launch,) = [one for one in driver.wake(60.0) if isinstance(one, Launch)]
    assert launch.attempt == 1
    driver.say("a", hello(1, 2))
    driver.resumed("a")
    return driver


def orders(commands: list[Command]) -> list[Command]:
    return [one for one in commands if isinstance(one, Kill | Launch)]


PAST = {
    "exit": Exited("a", 0, attempt=0),
    "end of its rank": RankGone("a", 0, pid=2, attempt=0),
    "end of a rank that it had": RankGone("a", 5, pid=9, attempt=0),
}


@pytest.mark.parametrize("event", PAST.values(), ids=PAST.keys())
def test_the_end_of_a_process_of_an_earlier_attempt_changes_nothing(event: Event) -> None:
    driver = second_attempt()
    before = picture(driver.core)
    assert driver.do(event) == []
    assert picture(driver.core) == before


def test_a_process_of_an_earlier_attempt_does_not_get_the_place_of_a_rank() -> None:
    driver = second_attempt()
    before = picture(driver.core)
    assert driver.say("a", hello(0, 7)) == []
    assert picture(driver.core) == before
    driver.do(RankGone("a", 0, pid=7, attempt=0))
    assert driver.core.jobs["a"].ranks[0].pid == 2


FUTURE = {
    "exit": Exited("a", 0, attempt=2),
    "end of its rank": RankGone("a", 0, pid=2, attempt=2),
}


@pytest.mark.parametrize("event", FUTURE.values(), ids=FUTURE.keys())
def test_what_is_said_of_an_attempt_that_was_not_begun_is_refused(event: Event) -> None:
    driver = second_attempt()
    before = picture(driver.core)
    with pytest.raises(IllegalTransitionError, match="attempt 2, after attempt 1"):
        driver.do(event)
    with pytest.raises(IllegalTransitionError, match="attempt 2, after attempt 1"):
        driver.say("a", hello(2, 3))
    assert picture(driver.core) == before


def test_what_names_no_attempt_is_of_the_present_one() -> None:
    driver = second_attempt()
    driver.do(RankGone("a", 0, pid=2))
    driver.do(Exited("a", 0))
    assert driver.state("a") is JobState.SUCCEEDED


def test_a_kill_names_its_attempt_and_purpose_and_the_verdict_stands_over_the_exit_code() -> None:
    driver = second_attempt()
    assert orders(driver.do(Cancelled("a", "enough"))) == [Kill("a", "enough", 1, Purpose.CANCEL)]
    driver.do(RankGone("a", 0, pid=2, attempt=1))
    driver.do(Exited("a", 0, attempt=1))
    assert driver.state("a") is JobState.CANCELLED


@pytest.mark.parametrize("first", [Purpose.RELAUNCH, Purpose.RELOCATE])
def test_the_purpose_of_an_end_becomes_stricter_only(first: Purpose) -> None:
    command = CommandFacts()
    command.end_for(first)
    command.end_for(Purpose.CANCEL)
    assert command.no_grace == (first is Purpose.RELOCATE)
    for later in Purpose:
        with pytest.raises(InvariantError):
            command.end_for(later)
    command.renew()
    assert (command.ending, command.no_grace) == (None, False)


def test_an_attempt_is_launched_once() -> None:
    command = CommandFacts()
    command.prepare(0.0)
    command.go_on(Stage.BRINGING)
    with pytest.raises(InvariantError, match="a second time"):
        command.prepare(1.0)
