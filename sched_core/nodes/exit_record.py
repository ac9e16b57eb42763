"""The record of a job's supervisor: whether it lives, its pid, how its command ended."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from .supervisor import LINE_BYTES

#: The exit code of a killed supervisor's command: only SIGKILL can end a supervisor.
KILLED = -signal.SIGKILL
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Record:
    """The content of a record.

    Attributes
    ----------
    alive
        True if the supervisor lives (it holds the lock).
    pid
        Its process; ``None`` before it has written that down.
    code
        The command's exit code; ``None`` before its end, and if the supervisor was killed.
    """

    alive: bool
    pid: int | None
    code: int | None


def job_of(path: Path) -> str:
    """Return the job of a record, whose name may also contain its attempt (``Processes``)."""
    return path.stem.partition("~")[0]


def create(path: Path) -> int:
    """Create an empty, locked record at ``path``. Its supervisor inherits the descriptor and the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def read(path: Path) -> Record | None:
    """Return the record at ``path``; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        alive = not _lockable(descriptor)
        pid, code = (_number(os.pread(descriptor, LINE_BYTES, start)) for start in (0, LINE_BYTES))
        return Record(alive, pid, code)
    finally:
        os.close(descriptor)


def settled(path: Path, patience_s: float) -> Record | None:
    """Return the record like ``read``. Wait up to ``patience_s`` for a supervisor that is starting."""
    for _ in range(round(patience_s / _LOOK_AGAIN_S)):
        found = read(path)
        if found is None or not found.alive or found.pid is not None:
            return found
        wait_a_moment()
    return read(path)


def wait_a_moment() -> None:
    """Sleep for a moment before a record is read again."""
    threading.Event().wait(_LOOK_AGAIN_S)


def exit_code(path: Path) -> int:
    """Return how the command of a dead supervisor ended."""
    found = read(path)
    return KILLED if found is None or found.code is None else found.code


def _lockable(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _number(line: bytes) -> int | None:
    """Return the number in ``line``; None if the line is not one that a supervisor writes."""
    found = re.fullmatch(rb"\s*(-?[0-9]{1,10})\s*", line)
    return int(found[1]) if found else None
