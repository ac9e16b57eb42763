"""Exclusive file locks that end with their process, whatever ends it, and do not live on in its children."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from .files import closed_in_children, open_checked


class FileLock:
    """An exclusive ``flock`` on a file, made when missing; taken by `wait` or `attempt`.

    The kernel drops the lock when the last descriptor of its open file closes. A forked child (a
    DataLoader's worker, say) inherits the descriptor and would keep the lock after its parent's
    death, so children close theirs first of all. One that was forked while another thread was about to
    make the lock does not know of it: so whoever has the lock takes it back before closing the file.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = open_checked(path, os.O_RDWR | os.O_CREAT)
        closed_in_children(self, FileLock._close)

    @classmethod
    def wait(cls, path: Path) -> Self:
        """The lock, as soon as nobody else has it."""
        lock = cls(path)
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX)
        return lock

    @classmethod
    def attempt(cls, path: Path) -> Self | None:
        """The lock, or ``None`` if somebody else has it."""
        lock = cls(path)
        try:
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.release()
            return None
        return lock

    @property
    def held(self) -> bool:
        """Whether this process holds it; never in a forked child."""
        return self.descriptor >= 0

    def release(self) -> None:
        """Let go of it; harmless if it was let go before."""
        if self.descriptor >= 0:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        """Close the file; the lock is let go of when nobody else has that open file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
