"""Commands whose node is lost and found: each is started once, and what was given up is ended at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gpuslice.sched_core.core.events import Exited, RankGone
from gpuslice.sched_core.live.job_processes import JobProcesses
from gpuslice.sched_core.nodes.node import Reports, Sought
from gpuslice.sched_core.policy import Start

from ..driver import Driver
from ..relocating import NODES, Quiet, launches, one_parked, plan

Arrived = Callable[[str], object]


class Node:
    """Node b, whose agent is asked for things."""

    name, joined = "b", True
    running: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.started: list[str] = []
        self.sought: list[str] = []
        self.grace_s = -1.0

    def launch(self, job: str, *_: object) -> None:
        self.started.append(job)

    def find_port(self, *_: object) -> None: ...

    def end(self, job: str, *, grace_s: float) -> None: ...

    def find(self, sought: Sought) -> None:
        if sought.job == "a":
            self.sought.append(sought.job)
            self.grace_s = sought.grace_s


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
    processes = JobProcesses(driver.core, nothing, lambda *_: {})
    remote = join(processes, node, transfers)
    processes.launch(launch)
    return processes, node, transfers, remote


def join(processes: JobProcesses, node: Node, transfers: Transfers | None) -> Any:
    """Give ``processes`` this node and node b; return what it knows of node b."""
    remote: Any = SimpleNamespace(
        nodes={"b": node}, transfers=transfers, begin=nothing, changed=nothing, copied=lambda *_: (0, 0)
    )
    remote.addresses = {"": "here", "b": "b"}
    local: Any = SimpleNamespace(
        processes=SimpleNamespace(log=nothing),
        find_port=nothing,
        launch=nothing,
        end=lambda *_, **__: None,
    )
    processes.begin(local, remote, Reports(nothing, nothing, nothing, nothing), nothing)
    return remote


def test_a_command_is_started_once_whose_state_arrives_as_its_node_is_asked_for_it() -> None:
    processes, node, transfers, remote = on_its_way()
    remote.changed(node)  # its agent has joined again, and is asked what became of the job
    assert node.sought == ["a"]
    transfers.arrived[0]("")
    assert node.started == []
    processes.missing("b", "a")
    transfers.arrived[1]("")
    assert node.started == ["a"]


def test_what_was_given_up_on_a_lost_node_is_ended_at_once_when_the_node_is_found() -> None:
    """With a grace time it could say Hello as a rank of the next attempt."""
    driver, node = Driver(1, Quiet(), NODES), Node()
    processes = JobProcesses(driver.core, driver.do, lambda *_: {})
    remote = join(processes, node, None)
    (launch,) = launches(driver.submit("a", 2))
    processes.launch(launch)
    processes.port_found("a", 0, 29500)
    node.joined = False
    remote.changed(node)
    assert driver.core.relocations.lost == {"b"}
    node.joined = True
    remote.changed(node)
    assert node.sought == ["a"]
    assert node.grace_s == 0.0 < driver.core.jobs["a"].spec.grace_s
