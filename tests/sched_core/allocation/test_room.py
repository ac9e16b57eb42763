"""A plan that puts a job on a node without room for its state is not carried out, and others use the node."""

from __future__ import annotations

from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Moved, NoRoom
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import Migrate, Start
from gpuslice.wire import Suspend as Stop

from ..driver import Driver, picture, told
from ..relocating import NODES, Quiet, idle, one_begun, one_parked, plan

FULL = NoRoom("a", {"b": "1 MiB left in its RAM disk, and its state needs 2 MiB"})
ROOM = NoRoom("a", {})


def test_a_job_that_trains_stays_where_its_state_is() -> None:
    policy, driver = one_begun()
    driver.do(FULL)
    assert not told(plan(driver, policy, Migrate("a", (1,))), Stop)
    assert driver.core.jobs["a"].wanted == (0,)
    assert driver.state("a") is JobState.RUNNING
    idle(driver, "x")
    plan(driver, policy, Start("x", (1,)))
    assert driver.core.jobs["x"].lease == (1,)


def test_a_parked_job_waits_for_a_device_where_its_state_is_and_its_place_is_free() -> None:
    policy, driver = one_parked(restartable=True)
    driver.do(FULL)
    job = driver.core.jobs["a"]
    plan(driver, policy, Start("a", (1,)))
    assert not job.relocating
    assert driver.core.jobs["x"].state is not JobState.FAILED
    assert set(driver.core.state.nodes.of(job.wanted)) <= {0}


def test_with_room_again_the_plan_is_carried_out() -> None:
    policy, driver = one_begun()
    driver.do(FULL)
    driver.do(ROOM)
    assert told(plan(driver, policy, Migrate("a", (1,))), Stop)


def test_what_its_owner_was_granted_goes_on() -> None:
    _, driver = one_begun()
    driver.do(FULL)
    assert told(driver.do(Moved("a", ("b/null:0",))), Stop)


def test_a_policy_plans_for_the_nodes_with_room() -> None:
    driver = Driver(1, RoundRobin(quantum_s=1.0), NODES)
    for job in "ab":
        driver.submit(job)
        driver.hello(job)
        driver.resumed(job)
        driver.progress(job, 5)
    home = {job: driver.core.state.nodes.named(driver.core.jobs[job].state_nodes)[0] for job in "ab"}
    assert sorted(home.values()) == ["", "b"]
    (other,) = {"", "b"} - {home["a"]}
    driver.do(NoRoom("a", {other: "1 MiB left"}))
    assert driver.core.jobs["a"].within == driver.core.jobs["a"].state_nodes
    replayed = driver.replayed(RoundRobin(quantum_s=1.0))
    assert picture(replayed) == picture(driver.core)


def test_a_gang_on_several_nodes_keeps_its_devices_when_another_node_is_full() -> None:
    policy = Quiet("spread")
    driver = Driver(2, policy, ("", "b", "c"))
    idle(driver, "g", 2)
    plan(driver, policy, Start("g", (0, 2)))
    driver.resumed("g", 0)
    driver.resumed("g", 1)
    assert driver.state("g") is JobState.RUNNING
    driver.do(NoRoom("g", {"c": "1 MiB left"}))
    assert driver.core.jobs["g"].lease == (0, 2)
    driver.core.check()


def test_a_gang_may_be_requested_on_several_nodes_when_another_node_is_full() -> None:
    policy = Quiet()
    driver = Driver(2, policy, ("", "b", "c"))
    idle(driver, "g", 2)
    plan(driver, policy, Start("g", (0, 1)))
    driver.resumed("g", 0)
    driver.resumed("g", 1)
    driver.do(NoRoom("g", {"c": "1 MiB left"}))
    driver.do(Moved("g", ("null:0", "b/null:0")))
    assert driver.core.jobs["g"].placement == (0, 2)
    driver.core.check()
