"""Exclusive file locks that end with their process, however it ends, and are not kept by its children."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from .files import closed_in_children, open_checked


class FileLock:
    """An exclusive ``flock`` on a file, which is created if missing; taken by `wait` or `attempt`.

    The kernel drops the lock when the last descriptor of the open file closes. A forked child (a DataLoader's
    worker, say) inherits the descriptor and would keep the lock after its parent's death, so children close
    theirs first. A child that was forked while another thread was making the lock does not know of it. So the
    owner unlocks before it closes the file.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = open_checked(path, os.O_RDWR | os.O_CREAT)
        closed_in_children(self, FileLock._close)

    @classmethod
    def wait(cls, path: Path) -> Self:
        """Wait until the lock is free, and return it."""
        lock = cls(path)
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX)
        return lock

    @classmethod
    def attempt(cls, path: Path) -> Self | None:
        """Return the lock, or None if another process has it."""
        lock = cls(path)
        try:
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.release()
            return None
        return lock

    @property
    def held(self) -> bool:
        """True if this process holds the lock; never in a forked child."""
        return self.descriptor >= 0

    def release(self) -> None:
        """Release the lock. Does nothing if it was released before."""
        if self.descriptor >= 0:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        """Close the file. The lock ends when no process has that open file any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
