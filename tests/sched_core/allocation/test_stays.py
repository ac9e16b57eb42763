"""Jobs stay on their node until a move to another one is worth what it costs."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice.sched_core.allocation.stays import Stays
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Brought,
    Exited,
    Held,
    Kill,
    Moved,
    NodeLost,
    RankGone,
    Released,
)
from gpuslice.sched_core.policies.fifo import Fifo
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import Policy

from ..driver import Driver, suspended
from ..relocating import NODES, kills

#: A start takes so long, from the launch to Hello, and from there to the first step.
IMPORT_S, SETUP_S = 2.0, 1.0
#: So long a job stays where it is if moving it takes as long as a start: the switch share is 0.03.
STAY_S = IMPORT_S / 0.03


def started(driver: Driver, job: str) -> None:
    """``job`` has its processes, which took their time."""
    driver.submit(job)
    driver.now_s += IMPORT_S
    driver.hello(job)


def trains(driver: Driver, job: str) -> None:
    """``job``, which was told to come, trains."""
    driver.resumed(job)
    driver.now_s += SETUP_S
    driver.progress(job, 10)
    assert driver.state(job) is JobState.RUNNING


def three_jobs(policy: Policy | None = None, **limits: float) -> Driver:
    """Jobs a and c are on this node, which has one device, and b is on the other; c waits."""
    driver = Driver(1, policy or RoundRobin(quantum_s=1.0), NODES, **limits)
    for job in "ab":
        started(driver, job)
        trains(driver, job)
    started(driver, "c")
    return driver


def parks(driver: Driver, job: str) -> list[Kill]:
    """``job`` parks as it was told. Return which jobs are to change their node."""
    gang = driver.core.jobs[job]
    report = suspended(gang.epoch, gang.asked.stop_at)
    return kills(driver.say(job, msgspec.structs.replace(report, restartable=True)))


def turn(driver: Driver, after_s: float = 1.0) -> list[Kill]:
    """The present slice ends; who is to leave does. Return which jobs are to change their node."""
    found = kills(driver.wake(after_s))
    for job in "abc":
        if driver.state(job) is JobState.SUSPENDING:
            found += parks(driver, job)
    for job in "abc":
        gang = driver.core.jobs[job]
        if driver.state(job) in (JobState.STARTING, JobState.RESUMING):
            driver.resumed(job)
            driver.progress(job, gang.ranks[0].boundary + 10)
    return found


def stays_on(driver: Driver) -> dict[str, int | None]:
    return {name: job.stays_on for name, job in driver.core.jobs.items()}


def test_jobs_take_turns_on_their_own_nodes() -> None:
    driver = three_jobs()
    assert stays_on(driver) == {"a": 0, "b": 1, "c": 0}
    for _ in range(6):
        assert not turn(driver)
        assert driver.core.jobs["b"].lease == (1,)


def test_a_job_may_leave_once_that_takes_its_share_of_the_time_only() -> None:
    driver = three_jobs()
    turn(driver)
    since_s = driver.now_s
    while not (found := turn(driver)):
        assert driver.now_s < since_s + 2 * STAY_S
    assert driver.now_s >= since_s + STAY_S - 1.0
    assert {kill.job for kill in found} <= {"a", "c"}


def test_without_a_share_no_job_stays() -> None:
    assert set(stays_on(three_jobs(switch_share=0.0)).values()) == {None}


def test_a_job_leaves_when_it_has_waited_as_long_as_that_takes_while_another_node_had_room() -> None:
    driver = three_jobs(Fifo())
    for job in "ab":
        driver.do(Held(job))
        parks(driver, job)
    driver.resumed("c")
    driver.progress("c", 10)
    driver.do(Released("a"))
    assert stays_on(driver)["a"] == 0
    assert not kills(driver.wake(IMPORT_S + SETUP_S - 0.5))
    found = kills(driver.wake(0.5))
    assert [kill.job for kill in found] == ["a"]
    assert stays_on(driver)["a"] is None


def test_a_job_that_has_not_trained_leaves_at_once_for_a_node_with_room() -> None:
    driver = three_jobs(Fifo())
    assert stays_on(driver)["c"] == 0
    driver.do(Held("b"))
    assert [kill.job for kill in kills(driver.wake(0.0)) + parks(driver, "b")] == ["c"]


def test_a_job_that_its_owner_moves_does_not_stay_where_it_was() -> None:
    driver = three_jobs()
    driver.do(Moved("a", ("b/null:0",)))
    assert {kill.job for job in "ab" for kill in parks(driver, job)} == {"a", "b"}
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", -9))
    assert stays_on(driver)["a"] is None
    driver.do(Brought("a", 1))
    driver.now_s += 1.0
    driver.hello("a")
    trains(driver, "a")
    assert stays_on(driver)["a"] == 1


def test_nobody_stays_on_a_lost_node() -> None:
    driver = three_jobs()
    driver.do(NodeLost("b"))
    assert stays_on(driver)["b"] is None


@pytest.mark.parametrize("held", [True, False])
def test_the_same_is_known_after_a_replay(*, held: bool) -> None:
    driver = three_jobs()
    for _ in range(3):
        turn(driver)
    if held:
        driver.do(Held("a"))
        driver.do(Released("a"))
    replayed = driver.replayed(RoundRobin(quantum_s=1.0))
    stays: Stays = replayed.allocation.stays
    assert {name: job.stays_on for name, job in replayed.jobs.items()} == stays_on(driver)
    assert stays.due_s() == driver.core.allocation.stays.due_s()
