"""The processes of jobs: started without a shell, watched by pidfd, and ended for certain.

Each command has a supervisor, and both are in a session (and so a process group) of their own. The supervisor
writes the exit code even if the scheduler is gone, and a restarted scheduler finds it. Ranks may be
grandchildren in other sessions (torchrun's are), so every rank is watched by the pid that the kernel
certified when it connected.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpuslice.clock import Clock
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.jobs.failures import ATTEMPT_MARK, TAIL_BYTES, telling
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Event, Exited, RankGone

from . import exit_record
from .started_ahead import StartedAhead, spawn

#: Time between SIGTERM and SIGKILL for processes without a grace of their own,
#: and for those that the command has not asked to end within its grace.
GRACE_S = 3.0
#: Children that are no longer watched, kept so that Python does not warn about them.
_left: list[subprocess.Popen[bytes]] = []
#: Longest start of a supervisor that another scheduler started in its last moment.
_STARTING_S = 30.0


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block, so that no process is lost track of."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    pending: list[int] = []
    former = {
        number: signal.signal(number, lambda number, frame: pending.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])


@dataclass(frozen=True, slots=True)
class _Command:
    """A job's supervisor process. ``child`` is set if this process started it and must wait for it."""

    job: str
    attempt: int
    pid: int
    child: subprocess.Popen[bytes] | None


class _Attempt(NamedTuple):
    """One attempt of a job."""

    job: str
    number: int


class _Rank(NamedTuple):
    job: str
    attempt: int
    number: int
    pid: int


def watch(process: subprocess.Popen[bytes]) -> int:
    """Return a descriptor that is readable when ``process``, the leader of a process group, has ended.

    Raises
    ------
    OSError
        If there is no descriptor left. Its end could not be noticed then, so it is killed, with its group.
    """
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


class Processes:
    """Every process of every job of one scheduler.

    Parameters
    ----------
    logs
        Directory for ``<job>.out``, ``<job>.err`` and the supervisor's record, ``<job>.exit``.

    Attributes
    ----------
    ahead
        The commands that were started before their turn.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.ahead = StartedAhead(logs, self._spawn)
        self._commands: dict[int, _Command] = {}
        self._ranks: dict[int, _Rank] = {}
        #: Times at which attempts that were asked to end are forced: all of their processes are asked; if
        #: those were, they are killed.
        self._deadlines_s: dict[_Attempt, float] = {}
        self._all_asked: set[_Attempt] = set()

    def launch(self, job: str, program: Program, extra: Mapping[str, str], *, attempt: int = 0) -> int:
        """Start ``program`` and return the descriptor to watch.

        What it prints is added to what is there: further attempts (``attempt`` above 0) follow those before.

        Raises
        ------
        OSError
            If it cannot be started.
        """
        record = self._record(job, attempt)
        self._forget_end(_Attempt(job, attempt))
        with uninterrupted():
            if attempt:
                with self.log(job, "err").open("ab") as err:
                    err.write(f"{ATTEMPT_MARK}{attempt + 1}\n".encode())
            process = self.ahead.take(job, program, extra, attempt, record)
            if process is None:
                process = self._spawn(job, program, extra, record)
            descriptor = watch(process)
            self._commands[descriptor] = _Command(job, attempt, process.pid, process)
        return descriptor

    def _spawn(
        self, job: str, program: Program, extra: Mapping[str, str], record: Path
    ) -> subprocess.Popen[bytes]:
        return spawn(program, extra, self.log(job, "out"), self.log(job, "err"), record)

    def launched(self, job: str, attempt: int) -> bool:
        """Return True if the command of that attempt of ``job`` was started, by whomever."""
        found = exit_record.read(self._record(job, attempt))
        return found is not None and (found.alive or found.pid is not None)

    def find(self, job: str, attempt: int = 0) -> int | Exited | None:
        """Return the state of the command of ``job``, which another scheduler started.

        Returns
        -------
        int | Exited | None
            The descriptor to watch, how it ended, or ``None`` if it was never started.

        Raises
        ------
        EnvironmentUnusableError
            If it is still being started, or ending, after a while.
        """
        late_s = time.monotonic() + _STARTING_S
        while True:
            found = exit_record.settled(self._record(job, attempt), _STARTING_S)
            if found is None or (found.pid is None and not found.alive):
                return None
            if not found.alive:
                return self._exited(job, attempt)
            if found.pid is None:
                raise EnvironmentUnusableError(f"job {job} is just being started", "try again in a moment")
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(found.pid)
                self._commands[descriptor] = _Command(job, attempt, found.pid, None)
                return descriptor
            # It has ended since. A fork of its that was killed with it may hold the record a little longer.
            if time.monotonic() >= late_s:
                raise EnvironmentUnusableError(f"job {job} is just ending", "try again in a moment")
            exit_record.wait_a_moment()

    def find_rank(self, job: str, attempt: int, rank: int, pid: int, mark: bytes) -> int | None:
        """Watch a rank that another scheduler knew, if process ``pid`` is still it.

        Parameters
        ----------
        mark
            An entry of its environment, which no other process that got its number would have.
        """
        try:
            if mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return None
        except OSError:
            return None
        try:
            return self.watch_rank(job, attempt, rank, pid)
        except ProcessLookupError:
            return None

    def watch_rank(self, job: str, attempt: int, rank: int, pid: int) -> int | None:
        """Watch a process that is or may become a rank. Return None if it is watched already.

        Raises
        ------
        ProcessLookupError
            If it is gone already.
        """
        found = _Rank(job, attempt, rank, pid)
        if found in self._ranks.values():
            return None
        descriptor = os.pidfd_open(pid)
        self._ranks[descriptor] = found
        return descriptor

    def log(self, job: str, stream: str) -> Path:
        """Return the file of ``stream`` (``out``, ``err``, ``exit`` or ``end``) of ``job``."""
        return self._logs / f"{job}.{stream}"

    def logged(self, job: str) -> bool:
        """Return True if a job of that name has left logs here."""
        return any(self.log(job, stream).exists() for stream in ("out", "err", "exit", "end"))

    def _record(self, job: str, attempt: int) -> Path:
        """Return the path of the supervisor's record. No job's name has a tilde."""
        return self.log(f"{job}~{attempt}" if attempt else job, "exit")

    def _exited(self, job: str, attempt: int) -> Exited:
        code = exit_record.exit_code(self._record(job, attempt))
        return Exited(job, code, self._said(job) if code else "", attempt=attempt)

    def _said(self, job: str) -> str:
        """Return the lines at the end of the job's stderr that tell why it failed."""
        try:
            with self.log(job, "err").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return telling(log.read().decode(errors="replace"))
        except FileNotFoundError:
            return ""

    def reap(self, descriptors: set[int]) -> Iterator[tuple[int, RankGone | Exited]]:
        """Return the events of ended processes, whose descriptors are readable: ranks, then commands."""
        for descriptor in descriptors & self._ranks.keys():
            job, attempt, rank, pid = self._ranks.pop(descriptor)
            os.close(descriptor)
            yield descriptor, RankGone(job, rank, pid=pid, attempt=attempt)
        for descriptor in descriptors & self._commands.keys():
            command = self._commands.pop(descriptor)
            os.close(descriptor)
            if command.child is not None:
                command.child.wait()
            yield descriptor, self._exited(command.job, command.attempt)

    def wait(self, wait_s: float | None = None) -> list[Event]:
        """Wait up to ``wait_s`` for the next events, and return them."""
        poll = select.poll()
        for descriptor in self.descriptors:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(None if wait_s is None else wait_s * 1000.0)
        return [event for _, event in self.reap({descriptor for descriptor, _ in ready})]

    def end_all(self, clock: Clock) -> None:
        """End every process and wait until none is left."""
        with uninterrupted():
            for job, attempt in self._attempts(lambda job, attempt: True):
                self.end(job, attempt, clock.now())
            while self.descriptors:
                self.wait(GRACE_S)
                self.enforce(clock.now())

    def end(self, job: str, attempt: int, now: float, grace_s: float = GRACE_S) -> None:
        """Ask the command of ``job`` to end, and see to it (``enforce``) that all of its processes do.

        Its supervisor passes the signal on to the command alone, and to the rest when the command has ended:
        a handler that saves a checkpoint still needs its workers. Asked again, only the time changes.
        Attempts before ``attempt`` are ended, too, later ones are not.
        """
        deadline_s = now + grace_s
        for one in self._attempts_until(job, attempt):
            if one in self._deadlines_s or self._ask(one):
                self._deadlines_s[one] = min(deadline_s, self._deadlines_s.get(one, deadline_s))

    def kill(self, job: str, attempt: int) -> None:
        """End every process of ``job`` up to ``attempt`` without asking it."""
        for one in self._attempts_until(job, attempt):
            self._forget_end(one)
            self._signal(one, signal.SIGKILL)

    def _forget_end(self, one: _Attempt) -> None:
        self._deadlines_s.pop(one, None)
        self._all_asked.discard(one)

    def close(self) -> None:
        """Stop watching. Running processes go on, but for those that were started before their turn."""
        self.ahead.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        _left.extend(one.child for one in self._commands.values() if one.child is not None)
        _left[:] = [child for child in _left if child.poll() is None]
        self._commands.clear()
        self._ranks.clear()

    def enforce(self, now: float) -> list[_Attempt]:
        """Kill processes that did not end in time. Return the jobs and attempts that had some.

        Processes that only their command could have asked are asked first, and have some seconds more.
        """
        killed = []
        for one in [one for one, deadline_s in self._deadlines_s.items() if now >= deadline_s]:
            if one not in self._all_asked:
                if self._signal(one, signal.SIGTERM):
                    self._all_asked.add(one)
                    self._deadlines_s[one] = now + GRACE_S
                else:
                    self._forget_end(one)
                continue
            self._forget_end(one)
            if self._signal(one, signal.SIGKILL):
                killed.append(one)
        return killed

    @property
    def next_deadline_s(self) -> float | None:
        """The time at which ``enforce`` must be called; None for never."""
        return min(self._deadlines_s.values(), default=None)

    @property
    def descriptors(self) -> list[int]:
        """All watched descriptors."""
        return [*self._commands, *self._ranks]

    @property
    def jobs(self) -> set[str]:
        """Jobs that have a process."""
        commands = {command.job for command in self._commands.values()}
        return commands | {rank.job for rank in self._ranks.values()}

    def _attempts(self, chosen: Callable[[str, int], bool]) -> list[_Attempt]:
        """Return the attempts of jobs that have a process, and that ``chosen`` returns True for."""
        there = {_Attempt(command.job, command.attempt) for command in self._commands.values()}
        there |= {_Attempt(rank.job, rank.attempt) for rank in self._ranks.values()}
        return sorted(one for one in there if chosen(*one))

    def _attempts_until(self, job: str, attempt: int) -> list[_Attempt]:
        """Return the attempts of ``job``, up to ``attempt``, that have a process."""
        return self._attempts(lambda name, number: name == job and number <= attempt)

    def _ask(self, one: _Attempt) -> bool:
        """Ask the command of an attempt to end; without one, its ranks. Return True if any was there."""
        commands = self._commands_of(one)
        if not commands:
            return self._signal(one, signal.SIGTERM)
        for descriptor in commands:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        return True

    def _signal(self, one: _Attempt, number: signal.Signals) -> bool:
        """Send a signal to the command's process group and to every rank. Return True if any was there."""
        found = False
        for descriptor in self._commands_of(one):
            found = True
            try:
                # Its group has its number for as long as the supervisor, its leader, is there.
                signal.pidfd_send_signal(descriptor, 0)
                os.killpg(self._commands[descriptor].pid, number)
            except ProcessLookupError:
                continue
        for descriptor in [fd for fd, rank in self._ranks.items() if (rank.job, rank.attempt) == one]:
            found = True
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                continue  # it is gone; its descriptor is readable and reap() will say so
        return found

    def _commands_of(self, one: _Attempt) -> list[int]:
        """Return the descriptors of the command of an attempt: one, or none."""
        return [fd for fd, command in self._commands.items() if (command.job, command.attempt) == one]
