"""A core, a clock, and short words for what can happen to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.facts import Way
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Event,
    FindPort,
    Notice,
    PortFound,
    Reported,
    Submitted,
    Tell,
    Woken,
)
from gpuslice.sched_core.live.job_history import JobHistory
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import Migrate, Plan, Policy, Start, Suspend, View
from gpuslice.types import DeviceName

PROGRAM = Program(("python", "train.py"), "/")
QUANTUM_S = 1.0
PORT = 29500
#: A report of progress that leads to nothing changes a rank's count. Where there are many jobs, to check all
#: of them after each such report would be half of a test's time.
HEARTBEATS_A_CHECK = 8


def devices(count: int) -> list[DeviceName]:
    return [DeviceName("null", index) for index in range(count)]


class Driver:
    """A core, a clock and short words for what happens; every event is kept and the invariants checked.

    Attributes
    ----------
    finds_ports
        True if each node finds a port at once for the ranks that are to meet there.
    """

    finds_ports = True

    def __init__(
        self,
        device_count: int = 1,
        policy: Policy | None = None,
        nodes: Sequence[str] = ("",),
        **limits: Any,
    ) -> None:
        there = [device.on(node) for node in nodes for device in devices(device_count)]
        self._limits = limits
        self.core = Core(there, policy or RoundRobin(quantum_s=QUANTUM_S), **limits)
        self.job_history = JobHistory(self.core)
        self.now_s = 0.25
        self.journal: list[tuple[Event, float]] = []

    def do(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, self.now_s)
        self.job_history.note(event, self.now_s, commands)
        self.journal.append((event, self.now_s))
        heartbeat = isinstance(event, Reported) and isinstance(event.message, wire.Progress)
        if commands or not heartbeat or len(self.journal) % HEARTBEATS_A_CHECK == 0:
            self.check_core()
        for command in commands[:] if self.finds_ports else ():
            if isinstance(command, FindPort):
                commands += self.do(PortFound(command.job, command.attempt, PORT))
        return commands

    def check_core(self) -> None:
        """Check the core's invariants, and that the job history has each job as the core has it."""
        self.core.check()
        for name, job in self.core.jobs.items():
            phase = self.job_history.accounts[name].phase
            assert (phase.state, phase.devices, phase.epoch) == (job.state, job.lease, job.epoch)

    def replayed(self, policy: Policy) -> Core:
        """The core that a new scheduler has from the journal; ``policy`` is what this one's was at first."""
        core = Core(self.core.devices, policy, **self._limits)
        for event, now_s in self.journal:
            core.handle(msgspec.json.decode(msgspec.json.encode(event), type=Event), now_s)
        return core

    def submit(self, job: str, ranks: int = 1) -> list[Command]:
        return self.do(Submitted(JobSpec(id=job, submit_s=self.now_s, devices=ranks), PROGRAM))

    def say(self, job: str, message: wire.FromAgent, rank: int = 0) -> list[Command]:
        return self.do(Reported(job, rank, message))

    def hello(self, job: str) -> list[Command]:
        ranks = len(self.core.jobs[job].ranks)
        return [
            command
            for rank in range(ranks)
            for command in self.say(
                job, wire.Hello(version=1, job=job, rank=rank, world_size=ranks, pid=1), rank
            )
        ]

    def resumed(self, job: str, rank: int = 0) -> list[Command]:
        gang = self.core.jobs[job]
        boundary = gang.ranks[rank].boundary
        return self.say(job, wire.Resumed(epoch=gang.epoch, boundary=boundary, stages_s={}), rank)

    def progress(self, job: str, boundary: int, rank: int = 0) -> list[Command]:
        epoch = self.core.jobs[job].epoch
        return self.say(job, wire.Progress(epoch=epoch, boundary=boundary, step=boundary), rank)

    def parked(self, job: str, boundary: int, rank: int = 0) -> list[Command]:
        return self.say(job, suspended(self.core.jobs[job].epoch, boundary), rank)

    def overshot(self, job: str, boundary: int, rank: int = 0) -> list[Command]:
        return self.say(job, wire.Overshot(epoch=self.core.jobs[job].epoch, boundary=boundary), rank)

    def wake(self, after_s: float = QUANTUM_S) -> list[Command]:
        self.now_s += after_s
        return self.do(Woken())

    def state(self, job: str) -> JobState:
        return self.core.jobs[job].state

    def running_pair(self) -> None:
        """Jobs a (running, boundary 10) and b (waiting) on one device."""
        for job in "ab":
            self.submit(job)
            self.hello(job)
        self.resumed("a")
        self.progress("a", 10)

    def running_gang(self, ranks: int = 3) -> None:
        """Gang g running, all ranks at boundary 10, and a gang that waits for its devices."""
        for job in "gh":
            self.submit(job, ranks)
            self.hello(job)
        for rank in range(ranks):
            self.resumed("g", rank)
            self.progress("g", 10, rank)


class Scripted:
    """Plans as told; ``None``: starts whoever waits on the lowest free device."""

    name = "scripted"
    needs_durations = False

    def __init__(self, placement: str = "count") -> None:
        self.placement = make_placement(placement)
        self.next: Callable[[View], Plan] | None = None
        self.resets = 0

    def plan(self, view: View) -> Plan:
        self.resets += view.changes.reset
        script, self.next = self.next, None
        if script is not None:
            return script(view)
        free = [device for node in view.free().on_node for device in node]
        return Plan([Start(job.id, (device,)) for job, device in zip(view.waiting(), free, strict=False)])


class Resizer(Scripted):
    """Starts jobs on device 0."""

    def plan(self, view: View) -> Plan:
        if self.next is None:
            return Plan([Start(job.id, (0,)) for job in view.waiting()])
        return super().plan(view)


class Resized(Driver):
    """A driver with one job of changing size, which it starts on the first of four devices."""

    def __init__(self, spec: JobSpec) -> None:
        self.policy = Resizer()
        super().__init__(4, self.policy)
        self.name = spec.id
        self.submitted = self.do(Submitted(spec, PROGRAM))

    @property
    def job(self) -> Gang:
        return self.core.jobs[self.name]

    def want(self, *onto: int) -> list[Command]:
        """Have the policy want it there, or nowhere."""
        self.policy.next = lambda view: Plan([Migrate(self.name, onto) if onto else Suspend(self.name)])
        self.core.state.plan_due = True
        return self.wake()


def notices(commands: list[Command]) -> list[Notice]:
    return [command for command in commands if isinstance(command, Notice)]


def suspended(epoch: int, boundary: int) -> wire.Suspended:
    return wire.Suspended(epoch=epoch, boundary=boundary, step=boundary, nbytes=8, stages_s={})


def refused(epoch: int, boundary: int, *, running: bool, retryable: bool = True) -> wire.Refused:
    return wire.Refused(
        epoch=epoch, boundary=boundary, running=running, error="no room", remedy="", retryable=retryable
    )


def told(commands: list[Command], kind: type[Any]) -> list[tuple[str, int, Any]]:
    return [
        (c.job, c.rank, c.message) for c in commands if isinstance(c, Tell) and isinstance(c.message, kind)
    ]


def picture(core: Core) -> bytes:
    """Everything the core knows, for comparing."""

    def of(job: Gang) -> dict[str, Any]:
        slots = {name for kind in type(job).__mro__ for name in getattr(kind, "__slots__", ())}
        values = {name: getattr(job, name) for name in sorted(slots - {"ranks", "history"})}
        ranks = [(rank.phase.value, rank.boundary, rank.step) for rank in job.ranks]
        return {**values, "ranks": ranks, "history": list(job.history)}

    jobs = [of(job) for job in core.jobs.values()]
    holders = [[job.id for job in core.ledger.holders(d)] for d in range(len(core.devices))]
    occupants = [list(found) for found in core.state.occupants]
    return msgspec.json.encode([jobs, holders, occupants])


def put_into(job: Gang, state: JobState, lease: tuple[int, ...] = ()) -> None:
    """Write the facts that make ``job`` be in ``state``, with ``lease``."""
    job.verdict.outcome = state if state.ended else None
    job.command.ending = Purpose.RELAUNCH if state is JobState.RELAUNCHING else None
    job.asked.stopping = state is JobState.SUSPENDING
    job.entry.way = {JobState.STARTING: Way.START, JobState.RESUMING: Way.RETURN}.get(state)
    job.entry.had = state is not JobState.QUEUED
    job.lease = lease or ((0,) if state is JobState.RUNNING else ())
    assert job.state is state
