"""One scheduler: a core with what carries out its commands, as ``live.scheduler`` has it, in virtual time.

All that a world knows of a core is in here: another core needs another class with these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from gpuslice import wire
from gpuslice.errors import GpusliceError, InvariantError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.places import processes_of
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import (
    Bring,
    Command,
    Compute,
    Computed,
    Event,
    Exited,
    FindPort,
    GiveUpAhead,
    Kill,
    Launch,
    Limited,
    Noted,
    Notice,
    RankGone,
    Reported,
    StartAhead,
    Tell,
    WakeAt,
    Woken,
    decode,
    encode,
)
from gpuslice.sched_core.live.job_processes import JobProcesses
from gpuslice.sched_core.live.rank_sessions import RankSessions
from gpuslice.sched_core.nodes.local_node import LocalNode
from gpuslice.sched_core.nodes.node import Connection, Reports
from gpuslice.sched_core.policies.ranked import RankedPolicy
from gpuslice.sched_core.policy import Policy

from .ground import Ground
from .nodes import Machine, RemoteNodes
from .policies import policy_of
from .scenario import Scenario

MakeCore = Callable[[Scenario], Core]
PROGRAM = Program(("python", "train.py"), "/")
_COMPUTE_S = 0.5
#: Where there are many jobs, to check all of them after each event would take most of the time.
_HEARTBEATS_A_CHECK = 8


class Outcome(NamedTuple):
    """How far a job has come, as ``ps`` shows it."""

    state: str
    ended: bool
    failure: str
    attempts: int
    restarts: int


class Past(NamedTuple):
    """An event of the journal, when it happened, and what followed from it."""

    event: bytes
    when_s: float
    commands: tuple[Command, ...]


def todays_core(scenario: Scenario) -> Core:
    """Return the core of today for ``scenario``."""

    def make_policy(name: str, options: Mapping[str, str] | None) -> Policy:
        policy = policy_of(name, scenario.seed, scenario.placement, shares=scenario.shares, options=options)
        if not scenario.profile.stays and isinstance(policy, RankedPolicy):
            policy.keeps_to_nodes = False
        return policy

    return Core(
        scenario.devices,
        make_policy(scenario.policy, scenario.options),
        quotas=scenario.quotas,
        device_memory_bytes=scenario.device_memory_bytes,
        make_policy=make_policy,
        starts_ahead=scenario.starts_ahead,
    )


class Journal:
    """The events of all schedulers so far; heartbeats from which nothing followed are thinned as on disk."""

    def __init__(self) -> None:
        self.past: list[Past] = []
        self._exits: set[tuple[str, int | None, str | None]] = set()
        self._heartbeats: dict[tuple[str, int], Past] = {}

    def append(self, event: Event, when_s: float, commands: Sequence[Command]) -> None:
        """Write an event down."""
        if isinstance(event, Exited):
            self._exits.add((event.job, event.attempt, event.node))
        written = Past(encode(event), when_s, tuple(commands))
        if not commands and isinstance(event, Reported) and isinstance(event.message, wire.Progress):
            self._heartbeats.pop((event.job, event.rank), None)
            self._heartbeats[event.job, event.rank] = written
            return
        self.past += [*self._heartbeats.values(), written]
        self._heartbeats.clear()

    def has_exit(self, job: str, attempt: int, node: str) -> bool:
        """Return True if a scheduler has heard that the command of that attempt has ended on ``node``."""
        return not self._exits.isdisjoint({(job, attempt, None), (job, attempt, node)})

    def lose_tail(self) -> None:
        """Lose what was not written yet."""
        self._heartbeats.clear()


class UntilClosed:
    """The scheduler's own node, which does nothing for a scheduler that has died while it gave orders."""

    def __init__(self, machine: Machine, closed: Callable[[], bool]) -> None:
        self._machine, self._closed = machine, closed

    def __getattr__(self, name: str) -> object:
        found = getattr(self._machine, name)
        return (lambda *_, **__: None) if callable(found) and self._closed() else found


class Scheduler:
    """See above. With a journal it becomes the scheduler that wrote it.

    Parameters
    ----------
    ground
        The world.
    make_core
        Makes the core.
    journal
        What has happened so far.
    local, remote
        The nodes.
    dies
        Called with each order to nodes before it is carried out, and again afterwards (True). Ends this
        scheduler for good if it returns True.
    """

    def __init__(
        self,
        ground: Ground,
        make_core: MakeCore,
        journal: Journal,
        local: Machine,
        remote: RemoteNodes | None,
        dies: Callable[[bool], bool] = lambda done: False,
    ) -> None:
        self._ground, self._journal = ground, journal
        self._core = make_core(ground.scenario)
        self._closed, self._wakes, self._events = False, 0, 0
        self._dies = dies
        #: The processes whose end has been told: a node may tell it again when one greets and is gone.
        self._ends: set[int] = set()
        self.remote = remote
        self._processes = JobProcesses(self._core, self.occur, _environ)
        self._sessions = RankSessions(
            self._processes.send, self.handle, self._processes.greeted, self._processes_of
        )
        reports = Reports(
            *(self._hear, self._processes.ended, self._processes.missing),
            *(self._processes.port_found, self._processes.waits_ahead),
        )
        here = cast(LocalNode, UntilClosed(local, lambda: self._closed))
        self._processes.begin(here, cast(Any, remote), reports, self._sessions.forget)
        self._take_over()
        local.open(reports)

    def close(self) -> None:
        """Do nothing any more; what was not written down is lost."""
        self._closed = True
        self._journal.lose_tail()
        if self.remote is not None:
            self.remote.transfers.close()

    @property
    def core(self) -> Core:
        """The core."""
        return self._core

    def limit_prestart(self, jobs: int) -> None:
        """Start at most so many jobs beyond those that run."""
        self.handle(Limited(jobs))

    def outcome(self, job: str) -> Outcome:
        """Return what ``ps`` shows of ``job``."""
        found = self._core.jobs[job]
        gone = found.processes_gone and found.state.ended
        return Outcome(found.state.value, gone, found.verdict.failure, found.attempt + 1, found.failures)

    def handle(self, event: Event) -> None:
        """Have the core decide on ``event``, and carry out what it says.

        Raises
        ------
        GpusliceError
            If that is impossible.
        """
        if self._closed:
            return
        written, now_s = encode(event), self._ground.loop.now_s
        try:
            commands = self._core.handle(decode(written), now_s)
            self._events += 1
            checked = commands or not self._events % _HEARTBEATS_A_CHECK
            # A late job is said to share nothing with one that leaves.
            if checked and not self._ground.scenario.shares:
                self._core.check()
        except InvariantError as error:
            raise self._ground.record.violated("the core broke a promise", error.message) from error
        except GpusliceError:
            raise
        except Exception as error:
            raise self._ground.record.violated(
                "the core failed", type(event).__name__, repr(error)
            ) from error
        self._journal.append(event, now_s, commands)
        if isinstance(event, RankGone):
            self._ends.add(event.pid)
        for command in commands:
            self._note(command)
            if isinstance(command, Tell):
                self._sessions.tell(command)
            elif isinstance(command, WakeAt):
                self._wake_at(command.when_s)
        for command in commands:
            self._perform(command)

    def _note(self, command: Command) -> None:
        orders = self._ground.orders
        match command:
            case Tell(message=wire.Resume(epoch=epoch)):
                lease = self._core.jobs[command.job].lease
                orders.grant(command.job, epoch, tuple(str(self._core.devices[one]) for one in lease))
            case Tell(message=wire.Suspend(epoch=epoch, stop_at=stop_at)):
                orders.stop(command.job, epoch, stop_at)
            case Kill():
                orders.end(command.job, command.attempt)
            case _:
                pass

    def occur(self, event: Event) -> bool:
        """Handle what happened though nobody said it: the core has to take it, the end of a process once."""
        try:
            self.handle(event)
        except GpusliceError as error:
            if isinstance(event, RankGone) and event.pid in self._ends:
                return False
            raise self._ground.record.violated("the core rejected", event, error.message) from error
        return True

    def _hear(self, connection: Connection, pid: int, frame: bytes) -> None:
        if not self._closed:
            self._sessions.hear(connection, pid, frame)

    def _processes_of(self, job: str, rank: int) -> list[int]:
        found = self._core.jobs.get(job)
        return [] if found is None else processes_of(found, rank)

    def _perform(self, command: Command) -> None:
        if self._closed:
            return
        match command:
            case Bring() | FindPort() | StartAhead() | GiveUpAhead() | Launch() | Kill():
                if not self._dies(False):
                    self._processes.perform(command)
                    self._dies(True)
            case Compute():
                answer = Computed(command.number, answer=command.task.compute())
                self._ground.loop.after(_COMPUTE_S, lambda: self.handle(answer))
            case Notice():
                if command.what == "policy_failed":
                    raise self._ground.record.violated("the policy failed", command.details)
                self._ground.record.tell(command.job, command.what)
                self.handle(Noted(command.what, command.job, command.details))

    def _wake_at(self, when_s: float | None) -> None:
        self._wakes += 1
        if when_s is not None:
            number = self._wakes
            self._ground.loop.at(when_s, lambda: self._wake(number))

    def _wake(self, number: int) -> None:
        if number == self._wakes and not self._closed:
            self.occur(Woken())

    def _take_over(self) -> None:
        """Live through the journal: the same commands follow from the same events."""
        wake_s: float | None = None
        for past in self._journal.past:
            event = decode(past.event)
            commands = self._core.handle(event, past.when_s)
            if isinstance(event, RankGone):
                self._ends.add(event.pid)
            # (A heartbeat that was left out may have put the next wake-up at another moment.)
            if _but_wake_ups(commands) != _but_wake_ups(past.commands):
                raise self._ground.record.violated(
                    "replayed it is another core", event, past.commands, commands
                )
            for command in commands:
                wake_s = command.when_s if isinstance(command, WakeAt) else wake_s
        self._wake_at(wake_s)

    def seek(self) -> None:
        """See what became of the jobs that another scheduler has started."""
        self._processes.find_all()
        if (left := self._core.allocation.planning.computations.unanswered) is not None:
            self._perform(left)


def _but_wake_ups(commands: Sequence[Command]) -> list[Command]:
    return [command for command in commands if not isinstance(command, WakeAt)]


def _environ(spec: JobSpec, ranks: int, program: Program) -> Mapping[str, str]:
    return {"RANKS": str(ranks)}
