"""Jobs on two nodes of a core without processes, for tests of what moves between them."""

from __future__ import annotations

import msgspec

from gpuslice.sched_core.core.events import (
    Command,
    Exited,
    Kill,
    Launch,
    RankGone,
)
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.policy import Migrate, Plan, Start, Suspend, View

from .driver import Driver, Scripted, suspended

#: The scheduler's own node, whose devices have no prefix, and another.
NODES = ("", "b")


class Quiet(Scripted):
    """Plans nothing that it was not told to."""

    def plan(self, view: View) -> Plan:
        self.next = self.next or (lambda view: Plan())
        return super().plan(view)


def launches(commands: list[Command]) -> list[Launch]:
    return [command for command in commands if isinstance(command, Launch)]


def kills(commands: list[Command]) -> list[Kill]:
    return [command for command in commands if isinstance(command, Kill)]


def plan(driver: Driver, policy: Quiet, *decisions: Start | Suspend | Migrate) -> list[Command]:
    policy.next = lambda view: Plan(list(decisions))
    driver.core.planning.due = True
    return list(driver.wake())


def idle(driver: Driver, job: str, ranks: int = 1) -> list[Command]:
    """``job`` has its processes and no device; what starting them took."""
    commands = driver.submit(job, ranks)
    driver.hello(job)
    return commands


def begun(policy: Quiet, driver: Driver, job: str) -> None:
    """``job`` runs on device 0."""
    idle(driver, job)
    plan(driver, policy, Start(job, (0,)))
    driver.resumed(job)
    driver.progress(job, 10)
    assert driver.state(job) is JobState.RUNNING


def one_begun() -> tuple[Quiet, Driver]:
    """Job a runs on device 0."""
    policy = Quiet()
    driver = Driver(1, policy, NODES)
    begun(policy, driver, "a")
    return policy, driver


def park(policy: Quiet, driver: Driver, job: str, *, restartable: bool) -> None:
    plan(driver, policy, Suspend(job))
    report = suspended(driver.core.jobs[job].epoch, 11)
    driver.say(job, msgspec.structs.replace(report, restartable=restartable))
    assert driver.state(job) is JobState.SUSPENDED
    assert not driver.core.jobs[job].relocation.ending


def one_parked(*, restartable: bool) -> tuple[Quiet, Driver]:
    """Job a is parked; y waits on node b, and x runs on device 0."""
    policy, driver = one_begun()
    park(policy, driver, "a", restartable=restartable)
    assert launches(idle(driver, "y"))[0].nodes == ("b",)
    begun(policy, driver, "x")
    return policy, driver


def on_its_way(driver: Driver) -> None:
    """The processes of job a are gone, and others are to be started on node b, where nothing arrives."""
    driver.do(RankGone("a", 0))
    (launch,) = launches(driver.do(Exited("a", -9)))
    assert (launch.nodes, launch.origin) == (("b",), ("",))
