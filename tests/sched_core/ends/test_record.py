"""What is owed when a job has ended, what was done, and that the next scheduler knows it from the events."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.sched_core.ends.record import MOST_TRIES, NOTIFY, ON_END, Delivery, EndRecord
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.failures import Kind
from gpuslice.sched_core.lifecycle.events import (
    ArraySubmitted,
    Cancelled,
    Exited,
    Point,
    RankGone,
    Requeued,
    Submitted,
)
from gpuslice.sched_core.live.job_history import JobHistory

from ..driver import PROGRAM, Driver

URL = "http://127.0.0.1:1/"


def submitted(driver: Driver, **fields: Any) -> None:
    asked = {"on_end": "true", "notify": URL} | fields
    driver.do(Submitted(JobSpec(id="a", submit_s=driver.now_s, **asked), PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 3)


def ends(driver: Driver, code: int, job: str = "a") -> None:
    driver.do(RankGone(job, 0, pid=1))
    driver.do(Exited(job, code))


def owed(record: EndRecord) -> list[tuple[str, str, int]]:
    return [(one.kind, one.end.job, one.end.attempt) for one in record.owed.values()]


def newest(driver: Driver) -> list[Delivery]:
    return driver.job_history.ends.newest(driver.core.jobs["a"])


@pytest.mark.parametrize(("code", "state"), [(0, "succeeded"), (3, "failed")])
def test_an_end_is_owed_to_command_and_url(code: int, state: str) -> None:
    driver = Driver()
    submitted(driver)
    driver.now_s += 2.0
    assert owed(driver.job_history.ends) == []
    ends(driver, code)
    assert owed(driver.job_history.ends) == [(ON_END, "a", 1), (NOTIFY, "a", 1)]
    end = newest(driver)[0].end
    assert (end.state, end.exit_code, end.began_s, end.ended_s) == (state, code, 0.25, 2.25)
    assert end.service_s == pytest.approx(2.0)


def test_a_restart_is_no_end_and_a_requeued_job_ends_again() -> None:
    driver = Driver()
    submitted(driver, max_restarts=1, notify="")
    ends(driver, -9)
    assert driver.core.jobs["a"].verdict.failure == Kind.INFRASTRUCTURE.value
    assert owed(driver.job_history.ends) == [], "it is started again"
    driver.wake(60.0)
    driver.hello("a")
    ends(driver, 0)
    assert owed(driver.job_history.ends) == [(ON_END, "a", 2)]
    driver.do(Requeued("a"))
    driver.hello("a")
    ends(driver, 0)
    assert owed(driver.job_history.ends) == [(ON_END, "a", 2), (ON_END, "a", 3)]


def test_a_job_that_was_never_started_ends_too() -> None:
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=0.25, hold=True, on_end="true"), PROGRAM))
    driver.do(Cancelled("a", "enough"))
    assert owed(driver.job_history.ends) == [(ON_END, "a", 1)]
    end = newest(driver)[0].end
    assert (end.state, end.exit_code, end.began_s, end.reason) == ("cancelled", None, None, "enough")


def test_every_job_of_an_array_ends_by_itself() -> None:
    driver = Driver()
    points = tuple(Point(f"a-{number}", PROGRAM.argv) for number in range(3))
    spec = JobSpec(id="a", submit_s=0.25, hold=True, notify=URL)
    driver.do(ArraySubmitted(spec, PROGRAM, points))
    driver.do(Cancelled("a-1", "enough"))
    assert owed(driver.job_history.ends) == [(NOTIFY, "a-1", 1)]


def test_a_try_that_fails_is_made_again_after_growing_pauses_and_given_up() -> None:
    driver = Driver()
    submitted(driver, notify="")
    ends(driver, 0)
    (delivery,) = newest(driver)
    pauses = []
    while delivery.owed:
        driver.do(delivery.outcome("exit code 1"))
        pauses.append(delivery.again_s - driver.now_s if delivery.owed else None)
        driver.now_s = max(driver.now_s, delivery.again_s)
    assert pauses == [2.0, 8.0, 32.0, 128.0, None]
    assert (delivery.tries, delivery.error) == (MOST_TRIES, "exit code 1")
    assert owed(driver.job_history.ends) == []


def test_the_next_scheduler_knows_what_is_owed() -> None:
    driver = Driver()
    submitted(driver)
    ends(driver, 0)
    command, message = newest(driver)
    driver.do(command.outcome("exit code 1"))
    driver.do(message.outcome(""))
    core = Driver().core  # a core of its own: it is told the same events
    again = JobHistory(core)
    for event, now_s in driver.journal:
        again.note(event, now_s, core.handle(event, now_s))
    assert list(again.ends.owed.values()) == [command]
    assert again.ends.newest(core.jobs["a"]) == [command, message]


def test_given_up_is_the_last_word() -> None:
    driver = Driver()
    submitted(driver, notify="")
    ends(driver, 0)
    (delivery,) = newest(driver)
    driver.do(delivery.outcome("the scheduler left", last=True))
    driver.do(delivery.outcome(""))
    assert (delivery.owed, delivery.error) == (False, "the scheduler left")
