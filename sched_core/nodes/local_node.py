"""The processes of jobs on this machine: start, listen to, watch and end them."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import zmq

from gpuslice import config
from gpuslice.clock import Clock
from gpuslice.sched_core.jobs.failures import CANNOT_START, telling
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited, RankGone

from . import exit_record
from .endpoint import bind, logs_directory
from .node import Connection, Reports, Sought
from .orphans import kill_orphans
from .process_ends import PAUSE_MS, ProcessEnds
from .processes import Processes
from .rank_socket import RankSocket
from .rendezvous import Ports

SOCKET = "scheduler.sock"
#: Interval at which to look whether a command that was started before its turn waits.
_AHEAD_MS = 50


def rank_endpoint(directory: Path) -> str:
    """Return where the ranks of a node connect, given the directory of its scheduler or agent."""
    return f"ipc://{directory / SOCKET}"


class LocalNode:
    """The jobs' processes on this machine. Its owner polls, and calls ``reap`` and ``attend``.

    Parameters
    ----------
    context
        The ZeroMQ context of the ranks' socket.
    directory
        Private; for that socket and the jobs' output.
    clock
        What time it is.
    reports
        Whom to tell.
    name
        Name of this node, as part of connections.

    Attributes
    ----------
    processes
        The jobs' processes, and the place of their output.
    ranks
        The ranks' socket: to be polled, and ``receive`` to be called when it can be read.

    Raises
    ------
    EnvironmentUnusableError
        If the directory's path is too long for a socket, or its logs are no directory.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: Path,
        clock: Clock,
        reports: Reports,
        *,
        name: str = "",
    ) -> None:
        self._clock = clock
        self._reports = reports
        self._name = name
        self.processes = Processes(logs_directory(directory))
        self.endpoint = rank_endpoint(directory)
        self.ranks = RankSocket(bind(context, self.endpoint), self._heard)
        #: Every process of every job behind one descriptor, however many they are.
        self._watched = select.epoll()
        self._ends = ProcessEnds(self.ranks)
        self._ports = Ports()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a process has ended. Then call ``reap``."""
        return self._watched.fileno()

    def launch(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        """Start the command of ``job``. If that is impossible, report its end with exit code 127.

        Nothing happens if that attempt was started before.
        """
        if self.processes.launched(job, attempt):
            return
        try:
            environ = self._environ(environ, attempt)
            descriptor = self.processes.launch(job, program, environ, attempt=attempt)
        except (OSError, ValueError) as error:
            self.refuse(job, attempt, f"{CANNOT_START}{_reason(error, program.directory)}")
            return
        self._watched.register(descriptor, select.EPOLLIN)

    def start_ahead(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        """Start the command of ``job`` before its turn. Report when it waits, or that this is impossible."""
        try:
            self.processes.ahead.start(job, program, self._environ(environ, attempt), attempt)
        except (OSError, ValueError):  # it is tried again, and the reason told, when its turn comes
            self._reports.waits_ahead(job, attempt)

    def give_up_ahead(self, job: str) -> None:
        """End the command of ``job`` that was started before its turn, if there is one."""
        self.processes.ahead.give_up(job)

    def _environ(self, environ: Mapping[str, str], attempt: int) -> dict[str, str]:
        """Return ``environ`` with what a command of this node is told besides."""
        who = {"socket": self.endpoint, "attempt": str(attempt)}
        return {**environ, **{config.variable(name): value for name, value in who.items()}}

    def refuse(self, job: str, attempt: int, said: str) -> None:
        """Report that an attempt of ``job`` cannot be started. What is ``said`` of it goes to its errors."""
        # The reason may be that nothing can be written.
        with suppress(OSError), self.processes.log(job, "err").open("a") as log:
            log.write(f"{said}\n")
        # The shell's convention for a command that cannot be executed.
        self._reports.ended(self._name, Exited(job, 127, telling(said), attempt=attempt))

    def find_port(self, job: str, attempt: int) -> None:
        """Report a port of this machine at which the ranks of that attempt can meet."""
        port = self._ports.find(job, self.processes.log(f"{job}~{attempt}", "port"))
        self._reports.port_found(job, attempt, port)

    def find(self, sought: Sought) -> None:
        """Watch the processes of a job that was started before, and report those that are gone."""
        job, told = sought.job, list[Callable[[], object]]()
        if not sought.exited:
            found = self.processes.find(job, sought.attempt)
            if isinstance(found, int):
                self._watched.register(found, select.EPOLLIN)
            elif found is not None:
                told.append(partial(self._tell_end, found))
            else:
                told.append(partial(self._reports.missing, self._name, job, sought.attempt))
        mark = os.fsencode(f"{config.variable('job')}={job}")
        for rank, pid in sought.ranks:
            descriptor = self.processes.find_rank(job, sought.attempt, rank, pid, mark)
            if descriptor is None:
                gone = RankGone(job, rank, unseen=True, pid=pid, attempt=sought.attempt)
                told.append(partial(self._reports.ended, self._name, gone))
            else:
                self._watched.register(descriptor, select.EPOLLIN)
        if sought.ended:
            self.end(job, sought.attempt, grace_s=sought.grace_s)
        for tell in told:  # last: the job may be started anew as soon as all of it is gone
            tell()

    def watch_rank(self, job: str, attempt: int, rank: int, pid: int, identity: bytes) -> None:
        """Watch a rank that has greeted. If it is gone, its end is reported after its last messages."""
        self.ranks.note(job, rank, pid, identity)
        try:
            descriptor = self.processes.watch_rank(job, attempt, rank, pid)
        except ProcessLookupError:
            self._ends.add(RankGone(job, rank, pid=pid, attempt=attempt), self._clock.now())
            return
        if descriptor is not None:
            self._watched.register(descriptor, select.EPOLLIN)

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send ``frame`` to the rank at ``identity``."""
        self.ranks.send(identity, frame)

    def end(self, job: str, attempt: int, *, grace_s: float) -> None:
        """End every process of ``job`` up to ``attempt`` after a grace; with 0 at once, without asking."""
        if grace_s:
            self.processes.end(job, attempt, self._clock.now(), grace_s=grace_s)
        else:
            self.processes.kill(job, attempt)
            kill_orphans(job, self.endpoint, attempt)

    def end_all(self) -> None:
        """End every process of every job, and wait until none is left."""
        self.processes.end_all(self._clock)

    def reap(self) -> None:
        """Note which processes have ended."""
        ready = {descriptor for descriptor, _ in self._watched.poll(0)}
        for _, event in self.processes.reap(ready):
            self._ends.add(event, self._clock.now())

    def attend(self) -> None:
        """Report processes that have ended, and kill those that did not end in time."""
        for end in self._ends.known(self._clock.now()):
            self._tell_end(end)
        for job, attempt in self.processes.enforce(self._clock.now()):
            kill_orphans(job, self.endpoint, attempt)
        for job, attempt in self.processes.ahead.arrived():
            self._reports.waits_ahead(job, attempt)

    @property
    def next_deadline_s(self) -> float | None:
        """When ``attend`` must be called, even if nothing happens; None for never."""
        return self.processes.next_deadline_s

    @property
    def pause_ms(self) -> int | None:
        """How long to wait, in ms, before ``attend`` is called though nothing happens; None if not at all."""
        if self._ends:
            return PAUSE_MS
        return _AHEAD_MS if self.processes.ahead else None

    def close(self) -> None:
        """Stop watching. The socket belongs to the context."""
        self._watched.close()
        self.processes.close()
        self._ports.close()

    def _heard(self, identity: bytes, pid: int, frame: bytes) -> None:
        self._reports.heard(Connection(self._name, identity), pid, frame)

    def _tell_end(self, end: Exited | RankGone) -> None:
        """Report the end of a command or a rank. If a command was killed, kill its descendants, too."""
        if isinstance(end, Exited):
            self._ports.release(end.job)
            if end.code == exit_record.KILLED:
                kill_orphans(end.job, self.endpoint, end.attempt)
        self._reports.ended(self._name, end)


def _reason(error: OSError | ValueError, directory: str) -> str:
    """Return why a command could not be started, naming the path that is wrong: program or directory."""
    if isinstance(error, OSError) and error.filename == directory:
        return f"its working directory {directory} cannot be entered: {error.strerror}"
    return str(error)
