"""Refused suspends and resumes: tried again ever later, by job and reason, until one succeeds."""

from __future__ import annotations

from gpuslice import wire
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Held
from gpuslice.sched_core.policy import Plan, Start, Suspend

from ..driver import Driver, Scripted, refused, told


def wake_until_told(driver: Driver) -> float:
    """Pass time until somebody is told to stop; how long that took."""
    begun_s = driver.now_s
    while not told(driver.wake(0.5), wire.Suspend):
        assert driver.now_s - begun_s < 100.0
    return driver.now_s - begun_s


def refusing() -> tuple[Driver, Scripted]:
    """Job a is on the device, b waits for it, and a is told to leave."""
    policy = Scripted()
    driver = Driver(1, policy)
    driver.running_pair()
    policy.next = lambda _: Plan([Suspend("a"), Start("b", (0,))])
    driver.core.state.plan_due = True
    assert wake_until_told(driver) == 0.5
    return driver, policy


def refuse(driver: Driver) -> None:
    driver.say("a", refused(1, 11, running=True))
    assert driver.state("a") is JobState.RUNNING


def test_the_pauses_before_the_next_try_of_a_suspend_double_until_one_succeeds() -> None:
    driver, policy = refusing()
    pauses = []
    for _ in range(4):
        refuse(driver)
        pauses.append(wake_until_told(driver))
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    driver.parked("a", driver.core.jobs["a"].asked.stop_at)
    driver.resumed("b")
    driver.progress("b", 3)
    policy.next = lambda _: Plan([Suspend("b"), Start("a", (0,))])
    driver.core.state.plan_due = True
    wake_until_told(driver)
    driver.parked("b", driver.core.jobs["b"].asked.stop_at)
    driver.say("a", wire.Resumed(epoch=2, boundary=11, stages_s={}))
    policy.next = lambda _: Plan([Suspend("a"), Start("b", (0,))])
    driver.core.state.plan_due = True
    wake_until_told(driver)
    driver.say("a", refused(2, 12, running=True))
    assert wake_until_told(driver) == 0.5, "it had succeeded in between"


def test_after_five_refusals_the_policy_plans_with_the_device_as_taken() -> None:
    driver, policy = refusing()
    jobs, resets = driver.core.jobs, policy.resets
    for _ in range(4):
        refuse(driver)
        assert (jobs["a"].running, jobs["b"].running) == (False, True)
        wake_until_told(driver)
    refuse(driver)
    assert (jobs["a"].running, jobs["b"].running) == (True, False)
    assert policy.resets == resets + 1
    policy.next = lambda _: Plan([Suspend("a"), Start("b", (0,))])
    driver.core.state.plan_due = True
    assert wake_until_told(driver) == 8.0, "what it plans again is tried after the pause"


def test_what_its_owner_wants_off_stays_told_to_leave_however_often_it_refuses() -> None:
    driver, _ = refusing()
    driver.do(Held("a"))
    for _ in range(7):
        refuse(driver)
        wake_until_told(driver)
    assert not driver.core.jobs["a"].running


def test_ranks_that_refuse_one_try_of_a_resume_count_as_one_refusal() -> None:
    driver = Driver(6)
    driver.submit("g", 6)
    driver.hello("g")
    for rank in range(6):
        driver.say("g", refused(1, 0, running=False), rank)
    assert driver.core.jobs["g"].refusals.resume.failures == 1
    assert len(told(driver.wake(0.5), wire.Resume)) == 6


def test_a_refused_resume_does_not_put_a_suspend_off() -> None:
    driver = Driver(1)
    driver.running_pair()
    job = driver.core.jobs["a"]
    job.refusals.resume.failed(driver.now_s + 50.0)
    driver.do(Held("a"))
    assert job.state is JobState.SUSPENDING


def test_service_is_attained_between_refusals_and_the_policy_hears_of_it() -> None:
    driver, policy = refusing()
    seen: list[list[str]] = []
    job = driver.core.jobs["a"]
    for _ in range(3):
        begun_s, service_s = driver.now_s, job.service_at(driver.now_s)
        plan, policy.plan = (
            policy.plan,
            lambda view: seen.append([j.id for j in view.changes.settled]) or Plan(),
        )
        refuse(driver)
        policy.plan = plan
        wake_until_told(driver)
        assert job.service_at(driver.now_s) == service_s + driver.now_s - begun_s
    assert seen == [["a"]] * 3
    assert driver.core.jobs["b"].without_devices_at(driver.now_s) == driver.now_s - 0.25
    assert (job.preemptions, driver.core.jobs["b"].preemptions) == (0, 0)
    driver.parked("a", job.asked.stop_at)
    assert job.preemptions == 1


def test_a_resume_that_was_said_again_after_a_hello_may_be_refused_twice() -> None:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    driver.parked("a", 11)
    driver.resumed("b")
    driver.progress("b", 3)
    driver.wake()
    driver.parked("b", 4)
    again = wire.Hello(version=4, job="a", rank=0, world_size=1, pid=1, boundary=11, epoch=2)
    assert len(told(driver.say("a", again), wire.Resume)) == 1
    driver.say("a", refused(2, 11, running=False))
    assert driver.say("a", refused(2, 11, running=False)) == []
    assert driver.core.jobs["a"].refusals.resume.failures == 1


def test_a_rank_that_parked_too_early_may_come_by_the_second_resume_although_it_refused_the_first() -> None:
    driver = Driver(2)
    driver.running_gang(2)
    driver.wake()
    job = driver.core.jobs["g"]
    driver.parked("g", 11)
    assert told(driver.overshot("g", 11, rank=1), wire.Resume), "rank 0 is to stop later, with the gang"
    again = wire.Hello(version=4, job="g", rank=0, world_size=2, pid=1, boundary=11, epoch=1)
    assert len(told(driver.say("g", again), wire.Resume)) == 1
    driver.say("g", refused(1, 11, running=False))
    driver.resumed("g")
    assert driver.state("g") is JobState.SUSPENDING
    for rank in range(2):
        driver.parked("g", job.asked.stop_at, rank)
    assert driver.state("g") is JobState.SUSPENDED
