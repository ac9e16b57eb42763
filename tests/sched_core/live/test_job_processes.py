"""Commands that wait for their state while their node is lost and found: each is started once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gpuslice.sched_core.core.events import Exited, RankGone
from gpuslice.sched_core.live.job_processes import JobProcesses
from gpuslice.sched_core.nodes.node import Reports, Sought
from gpuslice.sched_core.policy import Start

from ..relocating import launches, one_parked, plan

Arrived = Callable[[str], object]


class Node:
    """Node b, whose agent is asked for things."""

    name, joined = "b", True
    running: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.started: list[str] = []
        self.sought: list[str] = []

    def launch(self, job: str, *_: object) -> None:
        self.started.append(job)

    def find(self, sought: Sought) -> None:
        if sought.job == "a":
            self.sought.append(sought.job)


class Transfers:
    """States on their way, until they are said to have arrived."""

    def __init__(self) -> None:
        self.arrived: list[Arrived] = []

    def begin(self, job: str, origin: object, onto: object, done: Arrived, waiting: object) -> None:
        self.arrived.append(done)


def nothing(*_: object) -> None: ...


def on_its_way() -> tuple[JobProcesses, Node, Transfers, Any]:
    """The state of job a is on its way to node b, where its command is to be started."""
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    driver.do(RankGone("a", 0))
    (launch,) = launches(driver.do(Exited("a", -9)))
    node, transfers = Node(), Transfers()
    remote = SimpleNamespace(
        nodes={"b": node}, transfers=transfers, begin=nothing, changed=nothing, copied=lambda *_: (0, 0)
    )
    local: Any = SimpleNamespace(processes=SimpleNamespace(log=nothing))
    processes = JobProcesses(driver.core, nothing, lambda *_: {})
    there: Any = remote
    processes.begin(local, there, Reports(nothing, nothing, nothing, nothing), nothing)
    processes.launch(launch)
    return processes, node, transfers, remote


def test_a_command_is_started_once_whose_state_arrives_as_its_node_is_asked_for_it() -> None:
    processes, node, transfers, remote = on_its_way()
    remote.changed(node)  # its agent has joined again, and is asked what became of the job
    assert node.sought == ["a"]
    transfers.arrived[0]("")
    assert node.started == []
    processes.missing("b", "a")
    transfers.arrived[1]("")
    assert node.started == ["a"]
