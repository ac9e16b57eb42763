"""Commands of jobs that are started before their turn: each imports what it needs, then waits at its gate.

The gate is a file that this process holds locked. Byte 0 says that the command may go on; byte 1 that it
waits. When the lock is released without that word, because it is given up or this process is gone, the
command ends. Until it may go on it is no attempt of its job: its record has another name.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpuslice.config import BEGIN_ANEW, GATE, GO, WAITS
from gpuslice.sched_core.jobs.program import Program

from . import exit_record, supervisor

#: What the names of the files end with: the supervisor's record, and the gate.
_RECORD, _GATE = ".ahead", ".gate"

#: Starts a supervisor of a program with more variables, and with its record at a path.
Spawn = Callable[[str, Program, Mapping[str, str], Path], subprocess.Popen[bytes]]


def spawn(
    program: Program, extra: Mapping[str, str], out: Path, err: Path, record: Path
) -> subprocess.Popen[bytes]:
    """Start a supervisor of ``program``, with more variables and with its record at ``record``.

    What the program prints is added to the files ``out`` and ``err``.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    argv = program.argv
    if BEGIN_ANEW in extra:
        argv = (sys.executable, "-I", "-m", "gpuslice.training.begin_anew", *argv)
    with out.open("ab") as output, err.open("ab") as errors:
        inherited = exit_record.create(record)
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, str(inherited), *argv],
                cwd=program.directory,
                env={**program.environ, **extra},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=[inherited],
                start_new_session=True,
            )
        finally:
            os.close(inherited)


class _Ahead(NamedTuple):
    attempt: int
    program: Program
    environ: Mapping[str, str]
    process: subprocess.Popen[bytes]
    gate: int
    record: Path


class StartedAhead:
    """The commands that wait at their gates, at most one of each job.

    Parameters
    ----------
    logs
        Directory of the files. What an earlier scheduler or agent has left there is removed.
    spawn
        Starts a supervisor.
    """

    def __init__(self, logs: Path, spawn: Spawn) -> None:
        self._logs, self._spawn = logs, spawn
        self._waiting: dict[str, _Ahead] = {}
        #: The jobs whose command has not come to its gate yet.
        self._coming: set[str] = set()
        for left in (*logs.glob(f"*{_RECORD}"), *filter(_is_shut, logs.glob(f"*{_GATE}"))):
            left.unlink(missing_ok=True)

    def __bool__(self) -> bool:
        """True if a command is on its way to its gate."""
        return bool(self._coming)

    def start(self, job: str, program: Program, environ: Mapping[str, str], attempt: int) -> None:
        """Start the command of that attempt of ``job`` up to its gate, unless it was.

        Raises
        ------
        OSError
            If it cannot be started.
        """
        found = self._waiting.get(job)
        if found is not None and (found.attempt, found.program, found.environ) == (attempt, program, environ):
            return
        self.give_up(job)
        path, record = (self._logs / f"{job}~{attempt}{kind}" for kind in (_GATE, _RECORD))
        gate = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = self._spawn(job, program, {**environ, GATE: str(path)}, record)
        except OSError:
            os.close(gate)
            raise
        self._waiting[job] = _Ahead(attempt, program, environ, process, gate, record)
        self._coming.add(job)

    def take(
        self, job: str, program: Program, environ: Mapping[str, str], attempt: int, record: Path
    ) -> subprocess.Popen[bytes] | None:
        """Let the command of that attempt go on, with its record at ``record``. Return its supervisor.

        Return None if it does not wait. Another one that waits is given up.
        """
        found = self._waiting.get(job)
        wanted = attempt, program, environ
        if found is None or found.process.poll() is not None or found[:3] != wanted:
            self.give_up(job)
            return None
        found.record.rename(record)
        os.pwrite(found.gate, GO, 0)
        self._forget(job)  # its gate stays until it has passed: it may not have come to it yet
        return found.process

    def give_up(self, job: str) -> None:
        """End the command of ``job`` that waits, if there is one."""
        if (found := self._waiting.get(job)) is not None:
            if found.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(found.process.pid, signal.SIGKILL)
            found.process.wait()
            found.record.unlink(missing_ok=True)
            (self._logs / f"{job}~{found.attempt}{_GATE}").unlink(missing_ok=True)
            self._forget(job)

    def arrived(self) -> list[tuple[str, int]]:
        """Return jobs and attempts whose command has come to its gate since the last call, or has ended."""
        there = [(job, found) for job in self._coming if _has_arrived(found := self._waiting[job])]
        self._coming -= {job for job, _ in there}
        return [(job, found.attempt) for job, found in there]

    def close(self) -> None:
        """End all commands that wait."""
        for job in list(self._waiting):
            self.give_up(job)

    def _forget(self, job: str) -> None:
        found = self._waiting.pop(job)
        self._coming.discard(job)
        os.close(found.gate)


def _is_shut(gate: Path) -> bool:
    """Return True if the command of ``gate`` may not go on."""
    try:
        return gate.read_bytes()[:1] != GO
    except OSError:
        return True


def _has_arrived(found: _Ahead) -> bool:
    return os.pread(found.gate, 1, 1) == WAITS or found.process.poll() is not None
