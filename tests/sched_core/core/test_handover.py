"""Devices that are promised to whoever follows: how a promise ends, and that nothing is lost meanwhile."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError, InvariantError
from gpuslice.sched_core.core.events import (
    Cancelled,
    Exited,
    Held,
    Kill,
    RankGone,
    Released,
    Submitted,
)
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import Plan, Start, Suspend

from ..driver import PROGRAM, QUANTUM_S, Driver, Scripted, picture, refused, suspended, told

LIMIT_S = 10.0
COME = wire.Resumed(epoch=2, boundary=11, stages_s={"copy_in_s": 0.25})


@pytest.fixture
def driver() -> Driver:
    """Job b, told to stop at boundary 11; its device is promised to a, which is parked at boundary 11."""
    driver = Driver(handover=True)
    for job in "ab":
        driver.do(Submitted(JobSpec(id=job, submit_s=driver.now_s, boundary_timeout_s=LIMIT_S), PROGRAM))
        driver.hello(job)
    driver.resumed("a")
    driver.progress("a", 10)
    driver.wake()
    driver.parked("a", 11)
    driver.resumed("b")
    driver.progress("b", 10)
    commands = driver.wake()
    assert told(commands, wire.Expect) == [("a", 0, wire.Expect(epoch=2, device="null:0", predecessor="b"))]
    successor = wire.Successor(job="a", epoch=2)
    assert told(commands, wire.Suspend) == [("b", 0, wire.Suspend(epoch=1, stop_at=11, successor=successor))]
    return driver


def replayed(driver: Driver) -> None:
    """The journal so far gives the same core."""
    twin = driver.replayed(RoundRobin(quantum_s=QUANTUM_S))
    twin.check()
    assert picture(twin) == picture(driver.core)


def run_as_told(driver: Driver) -> None:
    """What a handover must end in: a runs alone on the device, b is parked."""
    a, b = driver.core.jobs["a"], driver.core.jobs["b"]
    assert (a.state, a.lease, a.epoch, a.promise) == (JobState.RUNNING, (0,), 2, None)
    assert (b.state, b.lease, b.successor) == (JobState.SUSPENDED, (), "")
    assert list(driver.core.occupants[0]) == ["a"]
    replayed(driver)


def test_the_successor_has_its_lease_when_the_predecessor_is_off_the_device(driver: Driver) -> None:
    assert driver.core.jobs["a"].lease == ()
    commands = driver.parked("b", 11)
    assert told(commands, wire.Resume) == [("a", 0, wire.Resume(epoch=2, device="null:0"))]
    assert driver.state("a") is JobState.RESUMING
    driver.say("a", COME)
    run_as_told(driver)


def test_what_the_successor_says_before_the_predecessor_is_kept(driver: Driver) -> None:
    assert driver.say("a", COME) == []
    for boundary in (12, 13):
        driver.say("a", wire.Progress(epoch=2, boundary=boundary, step=boundary))
    a = driver.core.jobs["a"]
    assert (a.state, a.lease, a.ranks[0].boundary) == (JobState.SUSPENDED, (), 11)
    assert a.promise is not None
    assert len(a.promise.early) == 2, "of heartbeats the newest is enough"
    replayed(driver)
    driver.parked("b", 11)
    run_as_told(driver)
    assert a.ranks[0].boundary == 13
    account = driver.job_history.accounts["a"]
    assert (account.switches, account.blackout_s) == (1, 0.25)


def test_an_successor_that_has_come_may_end_before_the_predecessor_is_heard_of(driver: Driver) -> None:
    driver.say("a", COME)
    driver.say("a", wire.Bye(epoch=2, boundary=14, step=14))
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", 0))
    assert driver.state("a") is JobState.SUCCEEDED
    assert driver.core.jobs["a"].ranks[0].step == 14
    driver.parked("b", 11)
    assert driver.state("b") is JobState.RESUMING, "nobody else wants the device"
    replayed(driver)


def test_a_scheduler_that_comes_back_hears_of_it_from_the_greetings(driver: Driver) -> None:
    hello = wire.Hello(version=2, job="a", rank=0, world_size=1, pid=1, boundary=12, epoch=2, parked=False)
    driver.say("a", hello)
    driver.say("b", wire.Hello(version=2, job="b", rank=0, world_size=1, pid=1, boundary=11, epoch=1))
    driver.parked("b", 11)
    run_as_told(driver)


def test_what_the_successor_trains_is_learnt_from_its_greeting(driver: Driver) -> None:
    hello = wire.Hello(version=2, job="a", rank=0, world_size=1, pid=1, boundary=12, epoch=2, parked=False)
    driver.say("a", hello)
    assert driver.say("a", wire.Profiled(epoch=2, tensors=4, nbytes=1000, largest_bytes=800)) == []
    driver.parked("b", 11)
    run_as_told(driver)
    assert driver.core.jobs["a"].skew == pytest.approx(0.8)


def test_who_greets_before_anything_has_happened_is_told_again(driver: Driver) -> None:
    parked = wire.Hello(version=2, job="a", rank=0, world_size=1, pid=1, boundary=11, epoch=1)
    commands = driver.say("a", parked)
    assert told(commands, wire.Expect) == [("a", 0, wire.Expect(epoch=2, device="null:0", predecessor="b"))]
    running = wire.Hello(version=2, job="b", rank=0, world_size=1, pid=1, boundary=10, epoch=1, parked=False)
    (order,) = told(driver.say("b", running), wire.Suspend)
    assert order[2].successor == wire.Successor(job="a", epoch=2)


def test_an_successor_that_declines_is_resumed_the_ordinary_way(driver: Driver) -> None:
    driver.say("a", wire.Declined(epoch=2, error="no room"))
    a = driver.core.jobs["a"]
    assert (a.state, a.promise, a.epoch) == (JobState.SUSPENDED, None, 2)
    driver.say("a", wire.Declined(epoch=2, error="said twice"))
    (order,) = told(driver.parked("b", 11), wire.Resume)
    assert order == ("a", 0, wire.Resume(epoch=3, device="null:0"))
    replayed(driver)


def test_a_late_decline_takes_nothing_back(driver: Driver) -> None:
    driver.parked("b", 11)
    driver.say("a", wire.Declined(epoch=2, error="the swap broke as the Resume was on its way"))
    assert driver.state("a") is JobState.RESUMING
    driver.say("a", COME)
    run_as_told(driver)


def test_a_predecessor_that_refuses_stays_and_the_next_time_nothing_is_promised(driver: Driver) -> None:
    commands = driver.say("b", refused(1, 11, running=True))
    assert told(commands, wire.Forget) == [("a", 0, wire.Forget(epoch=2))]
    assert driver.state("b") is JobState.RUNNING
    driver.say("a", wire.Declined(epoch=2, error="b could not leave"))
    assert driver.core.jobs["a"].promise is None
    (stop,) = told(driver.wake(), wire.Suspend)
    assert stop[2].successor is None
    assert told(driver.parked("b", 12), wire.Resume)[0][:2] == ("a", 0)
    replayed(driver)


def test_an_successor_that_is_held_is_asked_to_decline_and_stays_suspended(driver: Driver) -> None:
    assert told(driver.do(Held("a")), wire.Forget) == [("a", 0, wire.Forget(epoch=2))]
    driver.say("a", wire.Declined(epoch=2, error="it was told to"))
    driver.parked("b", 11)
    assert (driver.state("a"), driver.state("b")) == (JobState.SUSPENDED, JobState.RESUMING)
    driver.do(Released("a"))
    replayed(driver)


def test_an_successor_that_had_come_before_it_was_held_is_suspended_again(driver: Driver) -> None:
    driver.say("a", COME)
    driver.do(Held("a"))
    commands = driver.parked("b", 11)
    assert driver.state("a") is JobState.SUSPENDING
    assert [(job, order.epoch) for job, _, order in told(commands, wire.Suspend)] == [("a", 2)]
    driver.say("a", suspended(2, 12))
    assert (driver.state("a"), driver.state("b")) == (JobState.SUSPENDED, JobState.RESUMING)
    replayed(driver)


def test_the_device_of_a_cancelled_successor_is_free_when_its_processes_are_gone(driver: Driver) -> None:
    commands = driver.do(Cancelled("a", "enough"))
    assert any(isinstance(command, Kill) for command in commands)
    driver.parked("b", 11)
    assert list(driver.core.occupants[0]) == ["a"], "it may have come before it could be killed"
    assert driver.state("b") is JobState.SUSPENDED
    driver.do(RankGone("a", 0))
    driver.do(Exited("a", -9))
    assert driver.state("b") is JobState.RESUMING
    replayed(driver)


def test_a_promise_dies_with_its_successor(driver: Driver) -> None:
    driver.do(RankGone("a", 0))
    assert driver.core.jobs["b"].successor == ""
    driver.do(Exited("a", -9))
    driver.parked("b", 11)
    assert (driver.state("a"), driver.state("b")) == (JobState.FAILED, JobState.RESUMING)
    replayed(driver)


def test_the_successor_of_a_predecessor_that_dies_is_resumed(driver: Driver) -> None:
    driver.do(RankGone("b", 0))
    assert driver.state("a") is JobState.SUSPENDED
    (order,) = told(driver.do(Exited("b", -9)), wire.Resume)
    assert order == ("a", 0, wire.Resume(epoch=2, device="null:0"))
    driver.say("a", COME)
    assert driver.state("a") is JobState.RUNNING
    replayed(driver)


def test_a_late_predecessor_stays_and_its_successor_is_free_once_it_has_declined(driver: Driver) -> None:
    commands = driver.wake(LIMIT_S)
    assert told(commands, wire.Forget) == [("a", 0, wire.Forget(epoch=2))]
    assert driver.state("b") is JobState.RUNNING
    driver.say("a", wire.Declined(epoch=2, error="it was told to"))
    assert driver.core.jobs["a"].promise is None
    assert driver.core.jobs["b"].successor == ""
    replayed(driver)


def test_a_predecessor_that_was_called_off_too_late_has_left(driver: Driver) -> None:
    """Stopped after its last word to a, and before its report: nobody may send it back to the device."""
    driver.say("a", COME)
    driver.wake(LIMIT_S)
    assert driver.state("b") is JobState.RUNNING
    commands = driver.parked("b", 11)
    assert [job for job, _, _ in told(commands, wire.Resume)] == ["a"]
    b = driver.core.jobs["b"]
    assert (b.state, b.lease) == (JobState.SUSPENDED, ())
    assert list(driver.core.occupants[0]) == ["a"]
    replayed(driver)


@pytest.mark.parametrize(
    "message",
    [
        wire.Progress(epoch=2, boundary=12, step=12),
        wire.Bye(epoch=2, boundary=12, step=12),
        suspended(2, 12),
        refused(2, 11, running=False),
        wire.Overshot(epoch=2, boundary=12),
        wire.Resumed(epoch=3, boundary=12, stages_s={}),
        wire.Hello(version=2, job="a", rank=0, world_size=1, pid=1, boundary=12, epoch=2),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_an_successor_cannot_say_changes_nothing(driver: Driver, message: wire.FromAgent) -> None:
    before = picture(driver.core)
    with pytest.raises(IllegalTransitionError):
        driver.say("a", message)
    assert picture(driver.core) == before


def test_nobody_is_promised_anything_without_being_allowed_to() -> None:
    driver = Driver()
    driver.running_pair()
    for leaving, follower in ("ab", "ba", "ab"):
        commands = driver.wake()
        (order,) = told(commands, wire.Suspend)
        assert (order[0], order[2].successor, told(commands, wire.Expect)) == (leaving, None, [])
        driver.parked(leaving, order[2].stop_at)
        driver.resumed(follower)
        driver.progress(follower, order[2].stop_at + 10)


def test_nobody_else_enters_a_device_that_is_promised() -> None:
    policy = Scripted()
    driver = Driver(1, policy, handover=True)
    for job in "abc":
        driver.submit(job)
        driver.hello(job)
    driver.resumed("a")
    driver.progress("a", 10)
    for plan in (Plan([Suspend("a"), Start("b", (0,))]), Plan([Suspend("b"), Start("a", (0,))])):
        policy.next = lambda _, plan=plan: plan  # type: ignore[misc]
        (order,) = told(driver.wake(), wire.Suspend)
        driver.parked(order[0], order[2].stop_at)
        driver.resumed("b" if order[0] == "a" else "a")
        driver.progress("b" if order[0] == "a" else "a", 20)
    policy.next = lambda _: Plan([Suspend("a"), Start("b", (0,))])
    assert told(driver.wake(), wire.Expect)[0][0] == "b"
    together = [Start(job, (0,), shared=True) for job in "ac"]
    policy.next = lambda _: Plan([Suspend("b"), *together])
    driver.wake()
    assert (driver.state("c"), list(driver.core.occupants[0])) == (JobState.QUEUED, ["a"])
    driver.say("b", wire.Declined(epoch=2, error="it was told to"))
    assert list(driver.core.occupants[0]) == ["a", "c"]


def test_gangs_and_first_leases_are_promised_nothing() -> None:
    driver = Driver(3, handover=True)
    driver.running_gang(3)
    orders = told(driver.wake(), wire.Suspend)
    assert [order.successor for _, _, order in orders] == [None] * 3


def test_the_invariants_of_promises_can_fail(driver: Driver) -> None:
    driver.core.jobs["a"].epoch += 1
    with pytest.raises(InvariantError, match="promised epoch 2 and has 2"):
        driver.core.check()
    driver.core.jobs["a"].epoch -= 1
    driver.core.jobs["b"].successor = ""
    with pytest.raises(InvariantError, match="not by who has it"):
        driver.core.check()
