"""The record of a job's supervisor: whether it lives, who it is, how its command ended."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from .supervisor import LINE_BYTES

#: What the record of a supervisor that was killed stands for: only SIGKILL can end one.
KILLED = -signal.SIGKILL
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Record:
    """What a record says.

    Attributes
    ----------
    alive
        Whether the supervisor lives (it holds the lock).
    pid
        Its process; ``None`` before it has written that down.
    code
        The command's exit code; ``None`` before its end, and if the supervisor was killed.
    """

    alive: bool
    pid: int | None
    code: int | None


def job_of(path: Path) -> str:
    """The job of a record, which names its attempt, too (``Processes``)."""
    return path.stem.partition("~")[0]


def create(path: Path) -> int:
    """An empty, locked record at ``path``, for a supervisor to inherit: its lock is that of all copies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def read(path: Path) -> Record | None:
    """The record at ``path``; ``None`` if there is none."""
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
    """As ``read``; a supervisor that is just being started gets so long to write its number down."""
    for _ in range(round(patience_s / _LOOK_AGAIN_S)):
        found = read(path)
        if found is None or not found.alive or found.pid is not None:
            return found
        wait_a_moment()
    return read(path)


def wait_a_moment() -> None:
    """Before a record is looked at again."""
    threading.Event().wait(_LOOK_AGAIN_S)


def exit_code(path: Path) -> int:
    """How the command of a supervisor that is gone ended."""
    found = read(path)
    return KILLED if found is None or found.code is None else found.code


def _lockable(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _number(line: bytes) -> int | None:
    """The number in ``line``; ``None`` if there is none, or what no supervisor of ours has written."""
    found = re.fullmatch(rb"\s*(-?[0-9]{1,10})\s*", line)
    return int(found[1]) if found else None
