"""Notices that a scheduler's directory is deleted or moved: nobody could reach the scheduler any more."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from threading import Event

from gpuslice.sched_core.journal.journal import FILE
from gpuslice.sched_core.nodes.endpoint import CLIENT_SOCKET

#: inotify(7)
_IN_MOVED_FROM, _IN_DELETE, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x40, 0x200, 0x400, 0x800
_WATCHED = _IN_MOVED_FROM | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_EVENTS_BYTES = 1 << 16
#: Who deletes a directory deletes its files one after the other: so long after the first is looked again.
_DELETED_WITHIN_S = 1.0


class DirectoryWatch:
    """A watch over the directory of a scheduler that serves; a context manager.

    Parameters
    ----------
    directory
        The scheduler's. Journal and socket are there.

    Attributes
    ----------
    problem
        What has become of the directory. Empty while all is well.
    descriptor
        Can be read when ``look`` is to be called. It is -1 where the kernel gives none: nothing is noticed.
    """

    def __init__(self, directory: Path) -> None:
        self.problem = ""
        self._directory = directory
        self._open = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._journal = os.stat(FILE, dir_fd=self._open)
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor >= 0:
            libc.inotify_add_watch(self.descriptor, os.fsencode(directory), _WATCHED)

    def __enter__(self) -> DirectoryWatch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._open)
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def look(self) -> None:
        """Check the directory after something in it was removed."""
        os.read(self.descriptor, _EVENTS_BYTES)
        if not self.problem and self._find_problem():
            Event().wait(_DELETED_WITHIN_S)
            self.problem = self._find_problem()

    @property
    def journal_is_left(self) -> bool:
        """True if another scheduler can go on with the jobs, perhaps after the directory was moved back."""
        try:
            return os.path.samestat(os.stat(FILE, dir_fd=self._open), self._journal)
        except FileNotFoundError:
            return False

    def _find_problem(self) -> str:
        try:
            if not os.path.samestat(os.stat(self._directory), os.fstat(self._open)):
                return "was replaced"
        except FileNotFoundError:
            return "was deleted" if not self.journal_is_left else "was moved"
        if not self.journal_is_left:
            return f"has lost its {FILE}"
        return "" if (self._directory / CLIENT_SOCKET).exists() else f"has lost its {CLIENT_SOCKET}"
