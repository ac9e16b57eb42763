"""What the core orders is carried out once: while states are brought, nodes are lost and found, jobs end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpuslice.sched_core.jobs.command import Stage
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Bring,
    Brought,
    Cancelled,
    Command,
    Event,
    Exited,
    FindPort,
    Kill,
    Launch,
    NodeLost,
    PortFound,
    RankGone,
    StateWaits,
)
from gpuslice.sched_core.live.job_processes import JobProcesses
from gpuslice.sched_core.nodes.node import Reports, Sought
from gpuslice.sched_core.policy import Start

from ..driver import Driver, picture
from ..relocating import NODES, Quiet, one_parked, plan

Done = Callable[[str], object]


class Node:
    """A node that notes what it is asked for."""

    joined, silent = True, False
    running: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self.processes = SimpleNamespace(log=nothing)
        self.started: list[tuple[str, int]] = []
        self.ahead: list[tuple[str, int]] = []
        self.ports: list[str] = []
        self.sought: list[str] = []
        self.ended: list[str] = []
        self.asked: list[tuple[str, int]] = []
        self.grace_s = -1.0

    def launch(self, job: str, program: Program, environ: object, attempt: int) -> None:
        self.started.append((job, attempt))
        self.ports.append(program.environ.get("MASTER_PORT", ""))

    def find(self, sought: Sought) -> None:
        self.sought.append(sought.job)
        self.grace_s = sought.grace_s

    def start_ahead(self, job: str, program: Program, environ: object, attempt: int) -> None:
        self.ahead.append((job, attempt))

    def give_up_ahead(self, job: str) -> None:
        self.ahead.clear()

    def find_port(self, job: str, attempt: int) -> None:
        self.asked.append((job, attempt))

    def end(self, job: str, attempt: int, *, grace_s: float) -> None:
        self.ended.append(job)


class Transfers:
    """States on their way, until they are said to have arrived."""

    def __init__(self) -> None:
        self.brought: list[tuple[str, Sequence[str], Sequence[str]]] = []
        self.done: list[Done] = []
        self.waiting: list[Done] = []
        self.cancelled: list[str] = []

    def begin(
        self, job: str, sources: Sequence[str], targets: Sequence[str], done: Done, waits: Done, gone: Done
    ) -> None:
        self.brought.append((job, sources, targets))
        self.done.append(done)
        self.waiting.append(waits)

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)


def nothing(*_: object) -> Any:
    raise OSError("nothing is written here")


class Shell:
    """A shell around the core of ``driver``: it carries out orders, and hears of nodes ``b`` and this one."""

    def __init__(self, policy: Quiet, driver: Driver, *, transfers: bool = True) -> None:
        driver.finds_ports = False
        self.policy, self.driver = policy, driver
        self.here, self.b, self.transfers = Node(""), Node("b"), Transfers()
        self.remote: Any = SimpleNamespace(
            nodes={"b": self.b},
            transfers=self.transfers if transfers else None,
            addresses={"": "10.0.0.1", "b": "10.0.0.2"},
            begin=lambda *_: None,
            changed=None,
            answers=None,
            lost=set(),
            copied=lambda *_: (0, 0),
        )
        self.happened: list[Event] = []
        self.processes = JobProcesses(driver.core, self.occur, lambda *_: {})
        local: Any = self.here
        reports = Reports(nothing, nothing, nothing, nothing)
        self.processes.begin(local, self.remote, reports, lambda node: None)

    def occur(self, event: Event) -> None:
        self.happened.append(event)
        self.do(event)

    def do(self, event: Event) -> list[Command]:
        return self.perform(self.driver.do(event))

    def perform(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            if isinstance(command, Bring | FindPort | Launch | Kill):
                self.processes.perform(command)
        return commands

    def again(self) -> Shell:
        """Another shell, around a core that has lived through the same journal."""
        policy = Quiet(again=self.policy.made)
        driver = Driver(1, policy, NODES)
        driver.finds_ports = False
        for event, driver.now_s in self.driver.journal:
            driver.do(event)
        assert picture(driver.core) == picture(self.driver.core)
        other = Shell(policy, driver)
        other.processes.find_all()
        return other

    def lose(self) -> None:
        """Nothing was heard of node b for too long."""
        self.b.joined, self.b.silent = False, True
        self.remote.lost.add("b")
        self.remote.changed(self.b)

    def find(self) -> None:
        """The agent of node b has joined again."""
        self.b.joined, self.b.silent = True, False
        self.remote.lost.discard("b")
        self.remote.changed(self.b)

    @property
    def stage(self) -> Stage:
        return self.driver.core.jobs["a"].command.stage

    @property
    def job(self) -> Any:
        return self.driver.core.jobs["a"]


def bringing(*, transfers: bool = True) -> Shell:
    """The state of job a is on its way to node b, where its command is to be started."""
    policy, driver = one_parked(restartable=True)
    plan(driver, policy, Start("a", (1,)))
    driver.do(RankGone("a", 0))
    shell = Shell(policy, driver, transfers=transfers)
    shell.do(Exited("a", -9))
    return shell


def test_a_command_is_started_when_its_state_has_arrived() -> None:
    shell = bringing()
    assert shell.transfers.brought == [("a", ("",), ("b",))]
    assert (shell.stage, shell.b.started) == (Stage.BRINGING, [])
    shell.transfers.done[0]("")
    assert shell.happened == [Brought("a", 1)]
    assert shell.b.started == [("a", 1)]


def test_without_a_way_to_bring_it_a_job_begins_anew() -> None:
    shell = bringing(transfers=False)
    assert (shell.happened, shell.b.started) == ([Brought("a", 1)], [("a", 1)])


def test_that_its_state_waits_is_told_once() -> None:
    shell = bringing()
    for _ in range(2):
        shell.transfers.waiting[0]("no answer")
    assert shell.happened == [StateWaits("a", 1, "b", "no answer")]
    again = shell.again()
    again.transfers.waiting[0]("no answer")
    assert again.happened == [], "the journal has it"


def test_a_job_whose_state_cannot_be_brought_is_started_where_the_state_is() -> None:
    shell = bringing()
    shell.transfers.done[0]("no room")
    assert shell.happened[0] == Brought("a", 1, "no room")
    assert [type(event) for event in shell.happened[1:]] == [Exited]
    assert (shell.job.state, shell.job.relocation.refused) == (
        JobState.SUSPENDED,
        "not moved to b: no room",
    )
    assert (shell.job.attempt, shell.job.nodes) == (2, (0,))


def test_a_node_that_joins_while_a_state_is_brought_to_it_is_asked_for_nothing() -> None:
    """Its command was started nowhere. It was once sought there, and started twice."""
    shell = bringing()
    shell.remote.changed(shell.b)
    assert "a" not in shell.b.sought
    shell.transfers.done[0]("")
    assert shell.b.started == [("a", 1)]
    shell.remote.changed(shell.b)
    assert shell.b.sought.count("a") == 1


def test_a_command_that_never_arrived_at_its_node_is_started_when_the_node_says_so() -> None:
    shell = bringing()
    shell.transfers.done[0]("")
    shell.b.started.clear()
    again = shell.again()
    assert (again.b.sought.count("a"), again.b.started, again.transfers.brought) == (1, [], [])
    again.processes.missing("b", "a", 1)
    assert again.b.started == [("a", 1)]


def test_another_scheduler_brings_the_state_of_a_job_that_waited_for_it() -> None:
    again = bringing().again()
    assert again.transfers.brought == [("a", ("",), ("b",))]
    assert again.b.started == []
    again.transfers.done[0]("")
    assert again.b.started == [("a", 1)]


@pytest.mark.parametrize("anew", [False, True])
def test_a_job_that_is_cancelled_while_its_state_is_brought_is_never_started(anew: bool) -> None:
    shell = bringing()
    cancelled = Cancelled("a", "enough")
    if anew:  # the scheduler ends before it has carried out the order to end the job
        shell.driver.do(cancelled)
        shell = shell.again()
    else:
        shell.do(cancelled)
        assert shell.transfers.cancelled == ["a"]
        shell.transfers.done[0]("exit code -9")
    assert shell.happened == [Exited("a", -9, attempt=1)]
    assert (shell.job.state, shell.job.processes_gone) == (JobState.CANCELLED, True)
    assert (shell.b.started, shell.transfers.brought[1:]) == ([], [])


@pytest.mark.parametrize("anew", [False, True])
def test_a_job_whose_node_is_lost_while_its_state_is_brought_is_started_where_its_state_is(
    anew: bool,
) -> None:
    shell = bringing()
    if anew:
        shell.driver.do(NodeLost("b"))
        shell = shell.again()
    else:
        shell.lose()
        shell.transfers.done[0]("")
    assert [event for event in shell.happened if isinstance(event, Exited) and event.job == "a"] == [
        Exited("a", -9, "gpuslice: node b was lost" if anew else "", attempt=1)
    ]
    assert (shell.job.failures, shell.b.started) == (0, [])
    assert ("a", 2) in shell.here.started


def gang() -> Shell:
    """Gang a has a rank on each of two nodes, which are to meet."""
    policy = Quiet()
    driver = Driver(1, policy, NODES)
    shell = Shell(policy, driver)
    shell.perform(driver.submit("a", 2))
    assert (shell.stage, shell.here.asked) == (Stage.MEETING, [("a", 0)])
    return shell


def test_a_gang_is_started_when_it_is_known_where_its_ranks_meet() -> None:
    shell = gang()
    assert shell.here.started == shell.b.started == []
    shell.processes.port_found("a", 0, 4242)
    shell.processes.port_found("a", 0, 4343)
    assert shell.happened == [PortFound("a", 0, 4242)]
    assert shell.here.started == shell.b.started == [("a", 0)]
    assert shell.here.ports == shell.b.ports == ["4242"]


def test_another_scheduler_asks_for_the_port_and_tells_the_one_that_was_found() -> None:
    shell = gang()
    again = shell.again()
    assert (again.here.asked, again.here.started, again.b.started) == ([("a", 0)], [], [])
    again.processes.port_found("a", 0, 4242)
    third = again.again()
    assert third.here.asked == []
    third.processes.missing("b", "a", 0)
    assert third.b.ports == ["4242"]


def test_a_gang_that_waits_for_its_port_can_be_cancelled() -> None:
    shell = gang()
    shell.do(Cancelled("a", "enough"))
    shell.processes.port_found("a", 0, 4242)
    assert shell.happened == [Exited("a", -9, attempt=0)]
    assert shell.here.started == shell.b.started == []


@pytest.mark.parametrize("anew", [False, True])
def test_a_gang_ends_when_its_commands_have_on_all_nodes_and_as_the_first_that_failed(anew: bool) -> None:
    shell = gang()
    shell.processes.port_found("a", 0, 4242)
    shell.processes.ended("b", Exited("a", 1, "why"))
    assert (shell.happened[-1], shell.job.command.exit_code) == (Exited("a", 1, "why", node="b"), None)
    assert shell.here.ended == ["a"]
    if anew:
        shell = shell.again()
        assert (shell.here.sought, shell.b.sought) == (["a"], ["a"])
    shell.processes.ended("b", Exited("a", 1, "why"))
    shell.processes.ended("", Exited("a", -15))
    assert (shell.job.state, shell.job.command.exit_code, shell.job.command.said) == (
        JobState.FAILED,
        1,
        "why",
    )


@pytest.mark.parametrize("anew", [False, True])
def test_what_was_given_up_on_a_lost_node_is_ended_at_once_when_the_node_is_found(anew: bool) -> None:
    """With a grace time it could say Hello as a rank of the next attempt."""
    shell = gang()
    shell.processes.port_found("a", 0, 4242)
    shell.lose()
    assert shell.driver.core.state.nodes.lost == {"b"}
    if anew:
        shell = shell.again()
    shell.find()
    assert shell.b.sought == ["a"]
    assert shell.b.grace_s == 0.0 < shell.job.spec.grace_s


def test_a_gang_s_other_command_is_not_started_once_one_has_failed() -> None:
    """The first cannot even be started: that is told while the others are still to be started."""
    shell = gang()
    start = shell.here.launch

    def fail(job: str, program: Program, environ: object, attempt: int) -> None:
        start(job, program, environ, attempt)
        shell.processes.ended("", Exited(job, 127, "gpuslice: cannot start: no such file"))

    shell.here.launch = fail  # type: ignore[method-assign]
    shell.processes.port_found("a", 0, 4242)
    assert (shell.here.started, shell.b.started) == ([("a", 0)], [])
    assert (shell.job.state, shell.job.command.exit_code) == (JobState.FAILED, 127)
