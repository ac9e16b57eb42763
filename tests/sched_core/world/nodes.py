"""The nodes of a world: machines with commands and ranks, and how schedulers reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited, RankGone
from gpuslice.sched_core.nodes.node import Connection, Reports, Sought

from .ground import Ground
from .launchers import Command
from .ranks import RankProcess
from .states import Transfers

if TYPE_CHECKING:
    from .safety import Safety

RECONNECT_S = 0.3
AHEAD_S = 4.0
_PORT = 29500


class NoLogs:
    """Where jobs print: nowhere."""

    def log(self, job: str, stream: str) -> Path:
        """Return where nothing can be written."""
        return Path("/dev/null/no such directory")


class Machine:
    """One machine: does what a ``LocalNode`` does, and outlives every scheduler.

    Attributes
    ----------
    serves
        Whether somebody listens to its ranks.
    """

    def __init__(self, ground: Ground, safety: Safety, name: str, pids: Callable[[], int]) -> None:
        self.ground, self.safety, self.name = ground, safety, name
        self.ranks: dict[int, RankProcess] = {}
        self.processes = NoLogs()
        self.commands: dict[tuple[str, int], Command] = {}
        self.serves = False
        self._pids = pids
        self._reports: Reports | None = None
        self._watched: set[int | tuple[str, int]] = set()
        self._names: dict[bytes, RankProcess] = {}
        self._sessions = count(1)

    # A scheduler comes and goes.

    def open(self, reports: Reports) -> None:
        """Have ``reports`` told of everything from now on; all ranks connect anew."""
        self._reports, self.serves = reports, True
        self._watched.clear()
        session = next(self._sessions)
        for process in list(self.ranks.values()):
            if process.alive:
                process.connected = False
                delay_s = self.ground.draws.between(0.0, RECONNECT_S, *process.key, "session", session)
                process.after(delay_s, process.connect)

    def close(self) -> None:
        """Nobody listens any more."""
        self._reports, self.serves = None, False
        for process in self.ranks.values():
            process.disconnect()

    def crash(self) -> None:
        """Lose all processes, and all states."""
        for command in self.commands.values():
            command.vanish()
        self.ground.states.lose(self.name)

    # What a scheduler asks for (``node.Node``).

    def launch(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        """Start the command of ``job``."""
        run = self.safety.run(job, attempt, int(environ["RANKS"]))
        environ = {**environ, **program.environ}
        command = Command(self.ground, self, run, environ, self._pids)
        self.safety.launched(command, (job, attempt) in self.commands)
        self.commands[job, attempt] = command
        self._watched.add((job, attempt))
        command.begin()

    def start_ahead(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        """Start the command of ``job`` up to its gate, which takes a moment; a restarted agent forgets it."""
        delay_s = self.ground.draws.between(0.0, AHEAD_S, job, attempt, self.name, "ahead")
        reports = self._reports
        if reports is not None:
            self.ground.loop.after(
                delay_s, lambda: reports.waits_ahead(job, attempt) if self._reports is reports else None
            )

    def give_up_ahead(self, job: str) -> None:
        """End the command of ``job`` that waits at its gate: nobody has seen it."""

    def find_port(self, job: str, attempt: int) -> None:
        """Tell where the ranks of that attempt are to meet."""
        if self._reports is not None:
            self._reports.port_found(job, attempt, _PORT)

    def find(self, sought: Sought) -> None:
        """Watch what there is of a job that was started before; tell what is gone."""
        reports, told = self._reports, list[Callable[[], object]]()
        assert reports is not None
        job, key = sought.job, (sought.job, sought.attempt)
        command = self.commands.get(key)
        if sought.exited:
            pass
        elif command is None:
            told.append(lambda: reports.missing(self.name, job, sought.attempt))
        elif command.code is None:
            self._watched.add(key)
        else:
            end = Exited(job, command.code, command.said, attempt=sought.attempt)
            told.append(lambda: reports.ended(self.name, end))
        for rank, pid in sought.ranks:
            if (process := self.ranks.get(pid)) is not None and process.alive:
                self._watched.add(pid)
            else:
                gone = RankGone(job, rank, unseen=True, pid=pid, attempt=sought.attempt)
                told.append(lambda gone=gone: reports.ended(self.name, gone))
        if sought.ended:
            self.end(job, sought.attempt, grace_s=sought.grace_s)
        for tell in told:
            tell()

    def watch_rank(self, job: str, attempt: int, rank: int, pid: int, identity: bytes) -> None:
        """Tell when that process is gone."""
        self._watched.add(pid)
        self.ranks[pid].command.watched = True
        if not self.ranks[pid].alive:
            self.ended(self.ranks[pid])

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send ``frame`` to a rank."""
        if (process := self._names.get(identity)) is not None:
            process.tell(frame)

    def end(self, job: str, attempt: int, *, grace_s: float) -> None:
        """End every process of ``job`` up to ``attempt``."""
        for command in list(self.commands.values()):
            if command.job == job and command.attempt <= attempt:
                command.end(grace_s)

    # What becomes of processes.

    def running(self) -> tuple[str, ...]:
        """The jobs whose commands run here."""
        return tuple({command.job: None for command in self.commands.values() if command.code is None})

    def heard(self, process: RankProcess, frame: bytes) -> None:
        """A rank has said something."""
        self._names[process.identity] = process
        if self._reports is not None:
            self._reports.heard(Connection(self.name, process.identity), process.pid, frame)

    def ended(self, process: RankProcess) -> None:
        """A rank has ended; that is told after its last words."""
        event = RankGone(process.job, process.rank, pid=process.pid, attempt=process.attempt)
        self.ground.loop.at(process.up.last_s, lambda: self._tell(process.pid, event))

    def command_ended(self, command: Command) -> None:
        """A command has ended; that is told after the last words of its ranks."""
        event = Exited(command.job, command.code or 0, command.said, attempt=command.attempt)
        last_s = max((one.up.last_s for one in command.processes.values()), default=0.0)
        self.ground.loop.at(last_s, lambda: self._tell((command.job, command.attempt), event))

    def _tell(self, watched: int | tuple[str, int], event: Exited | RankGone) -> None:
        if watched in self._watched and self._reports is not None:
            self._watched.discard(watched)
            self._reports.ended(self.name, event)


class RemoteNode:
    """A machine as the scheduler reaches it: by an agent, over a line that may be cut."""

    def __init__(self, ground: Ground, machine: Machine) -> None:
        self.name, self.machine = machine.name, machine
        self.joined = self.silent = self._connected = False
        self.running: tuple[str, ...] = ()
        self.up, self.down = ground.line(self.name, "up"), ground.line(self.name, "down")

    @property
    def connected(self) -> bool:
        """True if its agent is connected, whether or not the scheduler knows."""
        return self._connected

    def join(self, reports: Reports) -> None:
        """Have the agent serve a scheduler, who is told of everything over the line."""
        up, self._connected = self.up, True
        self.machine.open(
            Reports(
                lambda *words: up.send(lambda: reports.heard(*words)),
                lambda *words: up.send(lambda: reports.ended(*words)),
                lambda *words: up.send(lambda: reports.missing(*words)),
                lambda *words: up.send(lambda: reports.port_found(*words)),
                lambda *words: up.send(lambda: reports.waits_ahead(*words)),
            )
        )

    def stall(self, until_s: float) -> None:
        """Deliver nothing before ``until_s``."""
        self.up.last_s, self.down.last_s = max(self.up.last_s, until_s), max(self.down.last_s, until_s)

    def leave(self) -> None:
        """Cut the agent off."""
        self._connected = False
        self.up.cut()
        self.down.cut()
        self.machine.close()

    def launch(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        self.tell(lambda: self.machine.launch(job, program, environ, attempt))

    def start_ahead(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        self.tell(lambda: self.machine.start_ahead(job, program, environ, attempt))

    def give_up_ahead(self, job: str) -> None:
        self.tell(lambda: self.machine.give_up_ahead(job))

    def find_port(self, job: str, attempt: int) -> None:
        self.tell(lambda: self.machine.find_port(job, attempt))

    def find(self, sought: Sought) -> None:
        self.tell(lambda: self.machine.find(sought))

    def watch_rank(self, job: str, attempt: int, rank: int, pid: int, identity: bytes) -> None:
        self.tell(lambda: self.machine.watch_rank(job, attempt, rank, pid, identity))

    def send(self, identity: bytes, frame: bytes) -> None:
        self.tell(lambda: self.machine.send(identity, frame))

    def end(self, job: str, attempt: int, *, grace_s: float) -> None:
        self.tell(lambda: self.machine.end(job, attempt, grace_s=grace_s))

    def tell(self, act: Callable[[], object]) -> None:
        """Have ``act`` done there, if the agent is connected, which the scheduler may know later."""
        if self.joined and self._connected:
            self.down.send(act)


class RemoteNodes:
    """All remote nodes of one scheduler: the part of ``remote_nodes.RemoteNodes`` that is called."""

    def stand_by(self, names: Iterable[str]) -> None:
        """Have nothing ready: a transfer begins when it is asked for."""

    def __init__(self, nodes: dict[str, RemoteNode], transfers: Transfers) -> None:
        self.nodes, self.transfers = nodes, transfers
        self.addresses = {name: name or "here" for name in ("", *nodes)}
        self.lost: set[str] = set()
        self.changed: Callable[[RemoteNode], object] = lambda node: None
        self.answers: Callable[[RemoteNode], object] = lambda node: None
        self.reports: Reports | None = None

    def begin(self, reports: Reports, log: Callable[[str, str], Path]) -> None:
        """Whom to tell."""
        self.reports = reports

    def copied(self, job: str, node: str) -> tuple[int, int]:
        return 0, 0

    def join(self, node: RemoteNode) -> None:
        """The agent of ``node`` has connected."""
        assert self.reports is not None
        node.join(self.reports)
        node.running = node.machine.running()
        node.up.send(lambda: self._joined(node))

    def _joined(self, node: RemoteNode) -> None:
        node.joined, node.silent = True, False
        self.lost.discard(node.name)
        self.changed(node)
        node.down.send(lambda: self._heard(node))

    def _heard(self, node: RemoteNode) -> None:
        """Its lease is renewed, after what must not run there any more was told to end."""
        for command in list(node.machine.commands.values()):
            command.thaw()

    def silence(self, node: RemoteNode) -> None:
        """Nothing was heard of ``node`` for a while."""
        if not node.silent:
            node.silent = True
            self.changed(node)

    def hear(self, node: RemoteNode) -> bool:
        """Hear of ``node`` over the same connection. Return False if it has to join anew."""
        if not node.joined or not node.connected:
            return False
        if node.silent:
            node.silent = False
            self.answers(node)
        return True

    def lose(self, node: RemoteNode) -> None:
        """Nothing was heard of ``node`` for too long."""
        if node.name not in self.lost:
            node.joined, node.silent = False, True
            self.lost.add(node.name)
            self.changed(node)
