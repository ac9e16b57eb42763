"""One slot file, kept mapped: its pages are faulted in once and used by every later suspend."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from .budget import Budget
from .files import open_checked, write_at
from .layout import align
from .tally import Residue

#: Arenas have whole huge pages; the spare part is small enough for two slots in 2.05 times the state.
STEP_BYTES = 2 << 20
_SPARE_SHARE = 64
#: ``MADV_POPULATE_WRITE`` of Linux 5.14: fault all pages in now. Python's mmap has no name for it yet.
_POPULATE_WRITE = 23

MapHook = Callable[[memoryview], None]


class MapHooks:
    """Whom to tell about mappings: a device that page-locks them. Every mapping is announced once.

    A mapping is withdrawn before it is unmapped, so a device can let go of it in time.
    """

    def __init__(self, on_map: MapHook | None = None, on_unmap: MapHook | None = None) -> None:
        self.mapped: MapHook = on_map or _ignore
        self.unmapping: MapHook = on_unmap or _ignore


def _ignore(memory: memoryview) -> None:
    """Nobody wants to know."""


class Arena:
    """A slot file and its mapping; grows, never shrinks while mapped.

    Parameters
    ----------
    path
        The slot file; made when first needed.
    budget
        Admits growth.
    """

    def __init__(self, path: Path, budget: Budget) -> None:
        self.path = path
        self._budget = budget
        self._descriptor = -1
        self._hooks = MapHooks()
        self._memory: memoryview | None = None
        #: What the pages hold since the last publish, as long as nobody else has written to them.
        self.residue: Residue | None = None

    @property
    def memory(self) -> memoryview | None:
        """The whole mapping, writable, or ``None`` before the first use."""
        return self._memory

    def bind(self, hooks: MapHooks) -> None:
        """Announce the present mapping and all later ones to ``hooks`` and no longer to the previous ones."""
        memory = self._memory
        self._unmap()
        self._hooks = hooks
        if memory is not None:
            self._announce(memory)

    def ensure(self, nbytes: int) -> memoryview:
        """A mapping of at least ``nbytes``, every page of it present.

        Raises
        ------
        RamDiskFullError
            If there is no room; a file made for this call is gone again, an older one as it was.
        """
        if self._memory is not None and len(self._memory) >= nbytes:
            return self._memory
        length = self.extend_file(align(nbytes, STEP_BYTES), align(nbytes // _SPARE_SHARE, STEP_BYTES))
        self._unmap()
        with self._budget.taking(length):
            mapping = mmap.mmap(self._descriptor, length)
            _populate(mapping)
        return self._announce(memoryview(mapping))

    def extend_file(self, nbytes: int, spare_bytes: int = 0) -> int:
        """Make the file at least ``nbytes`` long without touching the mapping; returns its length.

        All pages of a file that was opened here exist: those that a dead process left may not.
        """
        if self._descriptor >= 0:
            length = os.fstat(self._descriptor).st_size
            return length if length >= nbytes else self._budget.extend(self._descriptor, nbytes, spare_bytes)
        made = not self.path.exists()
        descriptor = open_checked(self.path, os.O_RDWR | os.O_CREAT)
        try:
            length = self._budget.extend(descriptor, nbytes, spare_bytes)
        except BaseException:
            os.close(descriptor)
            if made:
                self.path.unlink()
            raise
        self._descriptor = descriptor
        return length

    def write(self, data: bytes, position: int) -> None:
        """Write through the file, also beyond the mapping; both show the same pages.

        Raises
        ------
        RamDiskFullError
            If a file system that copies on write has no room even for what is there already.
        """
        with self._budget.taking(len(data)):
            write_at(self._descriptor, data, position)

    def _announce(self, memory: memoryview) -> memoryview:
        """Use a mapping only after the device has taken it."""
        self._hooks.mapped(memory)
        self._memory = memory
        return memory

    def _unmap(self) -> None:
        """Withdraw the mapping. Views that somebody still holds keep its pages until they die."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            self.residue = None
            self._hooks.unmapping(memory)

    def close(self) -> None:
        """Withdraw the mapping and close the file; the file stays."""
        self._unmap()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _populate(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel: the copy will fault the pages in
            raise
