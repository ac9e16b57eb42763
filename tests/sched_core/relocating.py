"""Jobs on two nodes of a core without processes, for tests of what moves between them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Bring,
    Brought,
    Command,
    Exited,
    Kill,
    Launch,
    RankGone,
    StateWaits,
)
from gpuslice.sched_core.policy import Migrate, Plan, Start, Suspend, View

from .driver import Driver, Scripted, suspended

#: The scheduler's own node, whose devices have no prefix, and another.
NODES = ("", "b")


class Quiet(Scripted):
    """Plans nothing that it was not told to.

    Parameters
    ----------
    placement
        As of ``Scripted``.
    again
        The plans of another one, which are made again in that order.
    """

    def __init__(self, placement: str = "count", again: Iterable[Plan] = ()) -> None:
        super().__init__(placement)
        self.made: list[Plan] = []
        self._again = list(again)

    def plan(self, view: View) -> Plan:
        self.next = self.next or (lambda view: self._again.pop(0) if self._again else Plan())
        self.made.append(super().plan(view))
        return self.made[-1]


def launches(commands: list[Command]) -> list[Launch]:
    return [command for command in commands if isinstance(command, Launch)]


def brings(commands: list[Command]) -> list[Bring]:
    return [command for command in commands if isinstance(command, Bring)]


def kills(commands: list[Command]) -> list[Kill]:
    return [command for command in commands if isinstance(command, Kill)]


def plan(driver: Driver, policy: Quiet, *decisions: Start | Suspend | Migrate) -> list[Command]:
    policy.next = lambda view: Plan(list(decisions))
    driver.core.state.plan_due = True
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
    assert not driver.core.jobs[job].relocating


def one_parked(*, restartable: bool) -> tuple[Quiet, Driver]:
    """Job a is parked; y waits on node b, and x runs on device 0."""
    policy, driver = one_begun()
    park(policy, driver, "a", restartable=restartable)
    assert launches(idle(driver, "y"))[0].nodes == ("b",)
    begun(policy, driver, "x")
    return policy, driver


def on_its_way(driver: Driver, job: str = "a") -> Bring:
    """Return the order to bring the state of ``job``, whose processes are gone, to another node."""
    driver.do(RankGone(job, 0))
    commands = driver.do(Exited(job, -9))
    assert not launches(commands)
    (bring,) = brings(commands)
    return bring


def brought(driver: Driver, job: str = "a") -> Launch:
    """Return the order to start ``job``, whose state has arrived."""
    (launch,) = launches(driver.do(Brought(job, driver.core.jobs[job].attempt)))
    return launch


def waits(driver: Driver, job: str = "a") -> list[Command]:
    """Return what follows when the state of ``job`` cannot be brought now."""
    return driver.do(StateWaits(job, driver.core.jobs[job].attempt, "b", "nobody answers"))
