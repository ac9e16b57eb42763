"""Nobody is ever sent to a node that is lost, whatever the policy; when it is found, it is used again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from gpuslice import wire
from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.ledger import Ledger
from gpuslice.sched_core.lifecycle.events import (
    Brought,
    Command,
    Event,
    Exited,
    Launch,
    Moved,
    NodeFound,
    NodeLost,
    Notice,
    RankGone,
    Submitted,
    Tell,
)
from gpuslice.sched_core.policies.registry import POLICIES, make_policy
from gpuslice.sched_core.policy import Plan, Policy, PolicyError, Start

from .driver import PROGRAM, Driver, Scripted, suspended

NODES = ("", "b", "c")
TICK_S = 10.0
MANY = 2000
#: Of each job, in devices; more than there are, so that somebody always waits.
DEMANDS = (1, 2, 1, 2, 1, 1, 2, 1)
WRAPPED: list[tuple[str, dict[str, Any]]] = [
    ("srtf", {"trial_nodes": 1, "trial_s": 50.0}),
    ("gandiva", {"trial_nodes": 1, "trial_s": 50.0}),
    ("fifo", {"trial_nodes": 2, "trial_s": 50.0}),
    ("2das", {"defragment": True}),
    ("drf", {"defragment": True}),
    ("las", {"pack": True}),
    ("sjf", {"relax_after_s": 30.0}),
]


class World(Driver):
    """Three nodes of as many devices, and jobs whose processes do at once what they are told."""

    def __init__(self, policy: Policy, size: int = 2) -> None:
        super().__init__(size, policy, NODES)
        self.lost: set[str] = set()
        self.used: set[str] = set()

    def do(self, event: Event) -> list[Command]:
        if isinstance(event, NodeLost):
            self.lost.add(event.node)
        elif isinstance(event, NodeFound):
            self.lost.discard(event.node)
        commands = super().do(event)
        for command in commands:
            if isinstance(command, Launch):
                assert self.lost.isdisjoint(command.nodes), command
            elif isinstance(command, Tell) and isinstance(command.message, wire.Resume):
                job = self.core.jobs[command.job]
                assert self.lost.isdisjoint(self.core.devices[device].node for device in job.lease)
            elif isinstance(command, Notice):
                assert command.what != "policy_failed", command.details
        return commands

    def start(self, number: int, demand: int, **more: Any) -> None:
        spec = JobSpec(
            id=f"j{number}",
            submit_s=self.now_s,
            devices=demand,
            max_restarts=9,
            expected_s=300.0,
            wait_for_node_s=0.0,
            **more,
        )
        self.do(Submitted(spec, PROGRAM))

    def lose(self, node: str) -> None:
        """It is lost, and so are the processes there, as the shell says."""
        self.do(NodeLost(node))
        self.wake(0.0)
        for job in list(self.core.jobs.values()):
            nodes = self.core.state.nodes.named(job.nodes)
            if job.told_to_end and not job.processes_gone and node in nodes:
                for rank in [rank for rank in job.there() if nodes[rank.number] == node]:
                    self.do(RankGone(job.id, rank.number))
                if set(nodes) == {node}:
                    self.do(Exited(job.id, -9))

    def tick(self) -> None:
        self.wake(TICK_S)
        for job in list(self.core.jobs.values()):
            if not job.processes_gone:
                self._live(job)

    def _live(self, job: Gang) -> None:
        if job.state.ended or job.relocating or job.state is JobState.RELAUNCHING:
            self._end(job, -9)
            return
        if job.command.stage is Stage.BRINGING:
            self.do(Brought(job.id, job.attempt))
        for rank in job.ranks:
            if rank.phase is RankPhase.ABSENT:
                hello = wire.Hello(
                    version=1, job=job.id, rank=rank.number, world_size=len(job.ranks), pid=rank.number + 1
                )
                self.say(job.id, hello, rank.number)
        for rank in job.present(RankPhase.COMING):
            self.resumed(job.id, rank.number)
        if job.state is JobState.SUSPENDING:
            for rank in job.present(RankPhase.ON):
                report = suspended(job.epoch, job.asked.stop_at)
                restartable = rank.number < job.keepers
                self.say(job.id, msgspec.structs.replace(report, restartable=restartable), rank.number)
        elif job.state is JobState.RUNNING:
            self.used.update(self.core.devices[device].node for device in job.lease)
            for rank in job.present(RankPhase.ON):
                self.progress(job.id, rank.boundary + 10, rank.number)
            if job.executed_at(self.now_s) > 300.0:
                self._end(job, 0)

    def _end(self, job: Gang, code: int) -> None:
        attempt = job.attempt
        for rank in job.present(RankPhase.ON) if not code else ():
            self.say(job.id, wire.Bye(epoch=job.epoch, boundary=rank.boundary, step=1), rank.number)
        for rank in job.there():
            self.do(RankGone(job.id, rank.number))
        if job.command.exit_code is None and job.attempt == attempt:
            self.do(Exited(job.id, code))

    def go(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()

    def finish(self) -> list[JobState]:
        """Let time pass until all jobs have ended."""
        for _ in range(MANY):
            self.tick()
            if all(job.state.ended and job.processes_gone for job in self.core.jobs.values()):
                break
        return [job.state for job in self.core.jobs.values()]


def world(name: str, options: Mapping[str, Any], size: int = 2) -> World:
    own = {"packing": False} if name == "gandiva" else {}
    return World(make_policy(name, {**own, **options}), size)


@pytest.mark.filterwarnings("ignore:HiGHS")
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in POLICIES), *WRAPPED], ids=lambda value: str(value) or "-"
)
def test_no_policy_uses_a_lost_node_and_every_policy_one_that_is_found(
    name: str, options: Mapping[str, Any]
) -> None:
    here = world(name, options)
    for number, demand in enumerate(DEMANDS):
        here.start(number, demand, **({"deadlines": ((90000.0, 1.0),)} if number % 2 else {}))
    here.go(16)
    assert {"b", "c"} <= here.used
    here.lose("c")
    here.go(20)
    here.lose("b")
    here.go(5)
    here.used.clear()
    here.do(NodeFound("c"))
    for number, demand in enumerate(DEMANDS, len(DEMANDS)):
        here.start(number, demand)
    assert set(here.finish()) == {JobState.SUCCEEDED}
    assert here.used == {"", "c"}


def test_what_is_left_of_the_cluster_is_what_a_policy_sees() -> None:
    policy = Scripted()
    driver = Driver(2, policy, NODES)
    seen: list[Cluster] = []

    def look(view: Any) -> Plan:
        seen.append(view.cluster)
        assert view.changes.reset
        return Plan()

    for event in (NodeLost("b"), NodeFound("b")):
        policy.next = look
        driver.do(event)
    assert [(one.size, one.node_sizes) for one in seen] == [(4, (2, 0, 2)), (6, (2, 2, 2))]


def test_a_plan_for_a_lost_device_is_refused() -> None:
    ledger = Ledger(Cluster([2, 2]), "wild")
    ledger.use(Cluster([2, 2]).without({1}))
    assert ledger.free == 2
    job = Gang(JobSpec(id="a", submit_s=0.0), 0, PROGRAM)
    with pytest.raises(PolicyError, match="device 3 cannot be had"):
        ledger.grant(job, (3,), shared=False, plan=Plan())
    ledger.use(Cluster([2, 2]))
    ledger.grant(job, (3,), shared=False, plan=Plan([Start("a", (3,))]))
    assert ledger.free == 3


def test_its_owner_cannot_move_a_job_to_a_lost_node() -> None:
    here = world("rr", {})
    here.start(0, 1)
    here.go(3)
    here.lose("c")
    with pytest.raises(UsageError, match="nothing is heard of node c"):
        here.do(Moved("j0", ("c/null:0",)))
    here.do(Moved("j0", ("b/null:1",)))
    here.lose("b")
    here.go(3)
    assert here.core.jobs["j0"].lease == (0,)


@pytest.mark.parametrize("ticks", range(6))
def test_a_job_on_its_way_to_a_node_that_is_lost_goes_on_where_it_came_from(ticks: int) -> None:
    here = world("rr", {})
    here.start(0, 1)
    here.go(5)
    here.do(Moved("j0", ("b/null:1",)))
    for _ in range(ticks):
        here.wake(TICK_S)
        here._live(here.core.jobs["j0"])
    here.lose("b")
    assert here.finish() == [JobState.SUCCEEDED]


def test_a_trial_is_made_on_devices_that_can_be_had() -> None:
    here = world("fifo", {})
    here.start(0, 2)
    here.go(2)
    here.lose("b")
    here.lose("c")
    here.start(1, 1, trial_batches=100)
    assert here.finish() == [JobState.SUCCEEDED] * 2


def test_a_gang_that_is_larger_than_what_is_left_waits_for_the_node() -> None:
    here = world("fifo", {})
    here.start(0, 6)
    here.go(3)
    here.lose("c")
    here.go(20)
    job = here.core.jobs["j0"]
    assert (job.state, set(job.nodes)) == (JobState.SUSPENDED, {0, 1})
    here.do(NodeFound("c"))
    assert here.finish() == [JobState.SUCCEEDED]
