"""Jobs whose state cannot move to another device go on where they left it, whatever a policy plans."""

from __future__ import annotations

import msgspec
import pytest

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Moved, Submitted
from gpuslice.sched_core.policy import Migrate, Plan, Start, Suspend

from .driver import PROGRAM, Driver, Scripted, refused, suspended, told
from .relocating import NODES

WHY = "float32 [5] cannot move to another device: C++ code refers to it"


def bound(epoch: int, boundary: int) -> wire.Suspended:
    return msgspec.structs.replace(suspended(epoch, boundary), bound=WHY)


def parked_at_home(*others: str) -> tuple[Driver, Scripted]:
    """Job a, parked and bound to device 0, and others that have been on no device; two devices."""
    policy = Scripted()
    driver = Driver(2, policy)
    driver.submit("a")
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 10)
    policy.next = lambda view: Plan([Suspend("a")])
    driver.core.state.plan_due = True
    driver.wake()
    policy.next = lambda view: Plan([])
    driver.say("a", bound(driver.core.jobs["a"].epoch, 11))
    assert driver.state("a") is JobState.SUSPENDED
    assert driver.core.jobs["a"].home == (0,)
    for job in others:
        policy.next = lambda view: Plan([])
        driver.submit(job)
        policy.next = lambda view: Plan([])
        driver.hello(job)
    return driver, policy


def plan(driver: Driver, policy: Scripted, *decisions: Start | Suspend | Migrate) -> list[object]:
    policy.next = lambda view: Plan(list(decisions))
    driver.core.state.plan_due = True
    return list(driver.wake())


def test_a_job_that_is_planned_elsewhere_goes_home() -> None:
    driver, policy = parked_at_home()
    commands = plan(driver, policy, Start("a", (1,)))
    assert [message.device for _, _, message in told(commands, wire.Resume)] == ["null:0"]
    assert driver.core.jobs["a"].placement == (0,)


def test_an_event_looks_only_at_jobs_that_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, policy = parked_at_home(*(f"job-{number}" for number in range(20)))
    looked: list[str] = []

    def away(job: Gang) -> bool:
        looked.append(job.id)
        return False

    monkeypatch.setattr("gpuslice.sched_core.allocation.bound_jobs.is_away", away)
    plan(driver, policy)
    assert set(looked) == {"a"}


def test_who_is_planned_there_goes_where_it_was_planned() -> None:
    driver, policy = parked_at_home("b")
    commands = plan(driver, policy, Start("a", (1,)), Start("b", (0,)))
    resumes = {job: message.device for job, _, message in told(commands, wire.Resume)}
    assert resumes == {"a": "null:0", "b": "null:1"}


def test_once_it_is_back_it_may_be_planned_anywhere() -> None:
    driver, policy = parked_at_home()
    plan(driver, policy, Start("a", (0,)))
    driver.resumed("a")
    driver.progress("a", 20)
    plan(driver, policy, Suspend("a"))
    policy.next = lambda view: Plan([])
    driver.parked("a", 21)
    commands = plan(driver, policy, Start("a", (1,)))
    assert [message.device for _, _, message in told(commands, wire.Resume)] == ["null:1"]


def test_of_two_with_one_home_one_waits() -> None:
    driver, policy = parked_at_home("b")
    plan(driver, policy, Start("b", (0,)))
    driver.resumed("b")
    driver.progress("b", 5)
    plan(driver, policy, Suspend("b"))
    policy.next = lambda view: Plan([])
    driver.say("b", bound(driver.core.jobs["b"].epoch, 6))
    # The policy of these tests starts whoever waits on what is free: a at home, and b on the other device.
    driver.core.state.plan_due = True
    driver.wake()
    jobs = driver.core.jobs
    assert {job: jobs[job].placement for job in "ab" if jobs[job].running} == {"a": (0,)}


@pytest.mark.parametrize("refused_before", [False, True])
def test_a_job_whose_resumed_was_lost_is_back_and_bound_no_more(*, refused_before: bool) -> None:
    driver = Driver()
    driver.running_pair()
    driver.wake()
    job = driver.core.jobs["a"]
    driver.say("a", bound(1, job.asked.stop_at))
    driver.resumed("b")
    driver.progress("b", 1)
    driver.wake()
    driver.parked("b", driver.core.jobs["b"].asked.stop_at)
    assert (job.state, job.bound) == (JobState.RESUMING, True)
    if refused_before:
        driver.say("a", refused(job.epoch, job.asked.stop_at, running=False))
    hello = wire.Hello(version=1, job="a", rank=0, world_size=1, pid=1, epoch=job.epoch, parked=False)
    driver.say("a", hello)
    assert (job.state, job.bound) == (JobState.RUNNING, False)


def test_a_bound_rank_keeps_its_device_when_its_job_grows_on_one_of_several_nodes() -> None:
    policy = Scripted()
    driver = Driver(2, policy, ("", "b"))
    policy.next = lambda view: Plan([])
    driver.do(Submitted(JobSpec(id="e", submit_s=0.25, devices=1, most_devices=2), PROGRAM))
    policy.next = lambda view: Plan([Start("e", (1,))])
    driver.hello("e")
    driver.resumed("e")
    driver.progress("e", 10)
    plan(driver, policy, Migrate("e", (0, 1)))
    commands = driver.say("e", bound(driver.core.jobs["e"].epoch, 11))
    assert [(rank, order.device) for _, rank, order in told(commands, wire.Resume)] == [
        (0, "null:1"),
        (1, "null:0"),
    ]


def test_devices_that_an_owner_names_keep_the_order_of_their_nodes() -> None:
    driver = Driver(2, None, NODES)
    driver.submit("a", 2)
    driver.do(Moved("a", ("b/null:0", "null:1")))
    driver.hello("a")
    job = driver.core.jobs["a"]
    assert job.placement == (2, 1)
