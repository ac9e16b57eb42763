"""Time limits: only time on the devices counts, over suspends, attempts, outages and the scheduler's end."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Exited,
    Held,
    Kill,
    Launch,
    RankGone,
    Released,
    Requeued,
    Submitted,
    WakeAt,
    Woken,
)
from gpuslice.sched_core.policies.rr import RoundRobin

from ..driver import PROGRAM, QUANTUM_S, Driver, notices, picture

LIMIT_S = 10.0


def limited(*, ranks: int = 1, **fields: object) -> Driver:
    """Job a, which may be on its devices for ten seconds; it has set up for two of them."""
    driver = Driver(2)
    fields |= {"devices": ranks, "time_limit_s": LIMIT_S}
    spec = JobSpec(id="a", submit_s=driver.now_s, **fields)  # type: ignore[arg-type]
    driver.do(Submitted(spec, PROGRAM))
    driver.now_s += 50.0  # it waits for its process
    driver.hello("a")
    for rank in range(ranks):
        driver.resumed("a", rank)
    driver.now_s += 2.0
    for rank in range(ranks):
        driver.progress("a", 1, rank)
    return driver


def killed(commands: list[Command]) -> list[Purpose]:
    return [command.purpose for command in commands if isinstance(command, Kill)]


def end(driver: Driver, code: int = 0, said: str = "") -> list[Command]:
    for rank in driver.core.jobs["a"].there():
        driver.do(RankGone("a", rank.number))
    return driver.do(Exited("a", code, said))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("code", "said"), [(0, ""), (-15, ""), (1, "ValueError: told to end")])
def test_a_job_ends_as_failed_with_a_class_of_its_own(ranks: int, code: int, said: str) -> None:
    driver = limited(ranks=ranks, max_restarts=3)
    assert killed(driver.wake(LIMIT_S - 2.5)) == []
    assert killed(driver.wake(0.5)) == [Purpose.FAIL]
    assert driver.state("a") is JobState.FAILED
    assert not driver.core.jobs["a"].may_restart
    (failed,) = notices(end(driver, code, said))
    reason = "it was on its devices for 10 s (--time-limit)"
    assert (failed.details["class"], failed.details["reason"]) == ("time_limit", reason)
    assert failed.details["restart_in_s"] is None
    job = driver.core.jobs["a"]
    assert (job.over, job.failures, job.lease) == (True, 0, ())


def test_the_core_asks_to_be_woken_at_the_limit() -> None:
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=0.0, time_limit_s=LIMIT_S), PROGRAM))
    driver.hello("a")
    (wake,) = [command for command in driver.resumed("a") if isinstance(command, WakeAt)]
    driver.progress("a", 1)
    assert wake.when_s == driver.now_s + LIMIT_S


def test_time_parked_and_on_the_way_does_not_count() -> None:
    driver = limited()
    driver.now_s += 3.0
    driver.do(Held("a"))
    driver.now_s += 1.0  # it trains until its boundary
    driver.parked("a", 2)
    driver.wake(1000.0)
    driver.do(Released("a"))
    driver.wake(100.0)  # it comes back
    driver.resumed("a")
    assert killed(driver.wake(3.75)) == []
    assert killed(driver.wake(0.25)) == [Purpose.FAIL]


def test_it_may_end_while_it_is_told_to_stop() -> None:
    driver = limited()
    driver.now_s += 7.0
    driver.do(Held("a"))
    assert driver.state("a") is JobState.SUSPENDING
    assert killed(driver.wake(1.0)) == [Purpose.FAIL]
    assert driver.parked("a", 2) == []
    end(driver)
    assert driver.core.jobs["a"].verdict.failure == "time_limit"


def test_attempts_count_together() -> None:
    driver = limited(max_restarts=1)
    driver.now_s += 5.0
    end(driver, -9)
    assert any(isinstance(command, Launch) for command in driver.wake(5.0))
    driver.hello("a")
    driver.resumed("a")
    assert killed(driver.wake(2.5)) == []
    assert killed(driver.wake(0.5)) == [Purpose.FAIL]


def test_a_job_that_is_requeued_has_all_of_its_time_again() -> None:
    driver = limited()
    driver.wake(LIMIT_S - 2.0)
    end(driver, -15)
    driver.do(Requeued("a"))
    driver.hello("a")
    driver.resumed("a")
    assert killed(driver.wake(LIMIT_S - 0.5)) == []
    assert killed(driver.wake(0.5)) == [Purpose.FAIL]


def test_a_job_that_ends_at_its_limit_by_itself_has_ended_by_itself() -> None:
    driver = limited()
    driver.now_s += LIMIT_S
    end(driver)
    assert killed(driver.wake()) == []
    assert driver.state("a") is JobState.SUCCEEDED


def test_the_next_scheduler_keeps_the_limit() -> None:
    driver = limited()
    driver.now_s += 3.0
    driver.do(Held("a"))
    core = driver.replayed(RoundRobin(quantum_s=QUANTUM_S))
    assert picture(core) == picture(driver.core)
    assert core.jobs["a"].has_had_devices_s(LIMIT_S) == driver.now_s + 5.0
    assert killed(core.handle(Woken(), driver.now_s + 4.5)) == []
    assert killed(core.handle(Woken(), driver.now_s + 5.0)) == [Purpose.FAIL]
