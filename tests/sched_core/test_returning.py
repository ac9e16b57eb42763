"""Jobs whose state cannot be brought to another node, which go on where it is."""

from __future__ import annotations

import msgspec

from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Exited,
    Held,
    Moved,
    RankGone,
)
from gpuslice.sched_core.policy import Migrate, Start, Suspend

from .driver import Driver, notices, suspended
from .relocating import (
    NODES,
    Quiet,
    begun,
    brings,
    brought,
    idle,
    kills,
    launches,
    on_its_way,
    one_begun,
    one_parked,
    park,
    plan,
    waits,
)


def test_a_job_whose_state_cannot_be_brought_returns_when_a_device_is_free_where_it_is() -> None:
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    on_its_way(driver)
    left_s = driver.core.jobs["a"].relocation.left_s
    assert left_s is not None
    assert not kills(waits(driver))
    assert [order.job for order in kills(plan(driver, policy, Suspend("x")))] == ["a"]
    driver.say("x", suspended(driver.core.jobs["x"].epoch, 11))
    (launch,) = launches(driver.do(Exited("a", -9)))
    assert launch.nodes == ("",)
    driver.hello("a")
    driver.resumed("a")
    (arrived,) = [note for note in notices(driver.progress("a", 12)) if note.what == "arrived"]
    assert arrived.details["blackout_s"] == driver.now_s - left_s, "since it left, not since it returns"
    job = driver.core.jobs["a"]
    assert (job.state, job.lease, job.failures) == (JobState.RUNNING, (0,), 0)


def test_a_job_returns_to_a_device_that_a_plan_gives_to_a_job_that_cannot_be_there() -> None:
    """The policy makes the same plan at each event. Both jobs would wait for ever."""
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("y", (1,)))
    driver.resumed("y")
    driver.progress("y", 10)
    park(policy, driver, "y", restartable=False)
    plan(driver, policy, Start("a", (1,)))
    on_its_way(driver)
    waits(driver)
    assert [order.job for order in kills(plan(driver, policy, Suspend("x"), Start("y", (0,))))] == ["a"]
    assert driver.core.jobs["a"].wanted == (0,)
    assert not driver.core.jobs["y"].wanted
    plan(driver, policy, Start("y", (1,)))
    driver.resumed("y")
    assert driver.state("y") is JobState.RUNNING


def test_a_job_on_its_way_home_goes_there_whatever_a_policy_plans_meanwhile() -> None:
    """A policy that changes its plan each time would send it off again before it has trained."""
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    on_its_way(driver)
    waits(driver)
    assert kills(plan(driver, policy, Suspend("x")))
    driver.say("x", suspended(driver.core.jobs["x"].epoch, 11))
    plan(driver, policy, Migrate("a", (1,)))
    (launch,) = launches(driver.do(Exited("a", -9)))
    assert launch.nodes == ("",)
    driver.hello("a")
    assert driver.core.jobs["a"].lease == (0,), "not the device of the plan, where it cannot go on"
    driver.resumed("a")
    driver.progress("a", 12)
    assert not driver.core.jobs["a"].relocation.stays


def test_a_job_that_its_owner_holds_on_its_way_returns_without_a_plan() -> None:
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    on_its_way(driver)
    driver.do(Held("a"))
    assert [order.job for order in kills(waits(driver))] == ["a"]
    (launch,) = launches(driver.do(Exited("a", -9)))
    assert launch.nodes == ("",)


def follow(driver: Driver, policy: Quiet, leaving: str, coming: str, device: int) -> list[Command]:
    """``coming`` gets the device of ``leaving``, on another node than its own; what is ordered then."""
    plan(driver, policy, Suspend(leaving), Start(coming, (device,)))
    report = suspended(driver.core.jobs[leaving].epoch, driver.core.jobs[leaving].asked.stop_at)
    driver.say(leaving, msgspec.structs.replace(report, restartable=True))
    driver.do(RankGone(coming, 0))
    return driver.do(Exited(coming, -9))


def test_two_jobs_that_wait_for_each_other_s_nodes_both_return() -> None:
    """Each time the device of a job's own node is another's, until none can go where it is to be."""
    policy = Quiet()
    driver = Driver(1, policy, NODES)
    for job in "abc":
        driver.submit(job)
        driver.hello(job)
    for job, device in (("a", 0), ("b", 1)):
        plan(driver, policy, Start(job, (device,)))
        driver.resumed(job)
        driver.progress(job, 10)
    assert launches(follow(driver, policy, "b", "c", 1))[0].nodes == ("b",)
    driver.hello("c")
    driver.resumed("c")
    driver.progress("c", 10)
    assert brings(follow(driver, policy, "a", "b", 0))[0].targets == ("",)
    assert brings(follow(driver, policy, "c", "a", 1))[0].targets == ("b",)
    assert not kills(waits(driver, "b"))
    assert {order.job for order in kills(waits(driver))} == {"a", "b"}
    for job, node, device in (("a", "", 0), ("b", "b", 1)):
        (launch,) = launches(driver.do(Exited(job, -9)))
        assert launch.nodes == (node,)
        driver.hello(job)
        driver.resumed(job)
        assert driver.core.jobs[job].lease == (device,)


def test_a_job_that_has_arrived_does_not_return() -> None:
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    on_its_way(driver)
    waits(driver)
    assert brought(driver).nodes == ("b",)
    driver.hello("a")
    assert not kills(plan(driver, policy, Suspend("x")))
    assert not kills(driver.say("x", suspended(driver.core.jobs["x"].epoch, 11)))
    assert driver.core.jobs["a"].nodes == (1,)


def test_a_job_whose_owner_has_sent_it_waits_until_it_can_go_or_is_called_back() -> None:
    _, driver = one_begun()
    driver.do(Moved("a", ("b/null:0",)))
    report = suspended(driver.core.jobs["a"].epoch, 11)
    driver.say("a", msgspec.structs.replace(report, restartable=True))
    on_its_way(driver)
    assert not kills(waits(driver))
    assert driver.core.jobs["a"].nodes == (1,)
    assert kills(driver.do(Moved("a", ("null:0",))))
    assert launches(driver.do(Exited("a", -9)))[0].nodes == ("",)


def test_a_job_whose_owner_wants_it_where_it_is_returns_as_others_do() -> None:
    policy, driver = one_begun()
    driver.do(Moved("a", ("null:0",)))
    park(policy, driver, "a", restartable=True)
    idle(driver, "y")
    begun(policy, driver, "x")
    plan(driver, policy, Start("a", (1,)))
    on_its_way(driver)
    waits(driver)
    assert [order.job for order in kills(plan(driver, policy, Suspend("x")))] == ["a"]
