"""One slot file that stays mapped: its pages are faulted in once and used by every later suspend."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpuslice.checkpoint.files import open_checked, write_at
from gpuslice.checkpoint.format.checksums import ArenaChecksums
from gpuslice.checkpoint.format.layout import align
from gpuslice.checkpoint.format.pieces import TRAILER_BYTES, TRAILER_MAGIC
from gpuslice.checkpoint.format.safetensors_header import PREAMBLE_BYTES
from gpuslice.kernels.host.memory_files import map_file, remove
from gpuslice.kernels.host.numa import near
from gpuslice.kernels.host.process_memory import populate, view_address

from .budget import Budget, Own
from .slots import remove_pieces

#: Files grow in steps of this many bytes.
STEP_BYTES = 2 << 20

MapHook = Callable[[memoryview], None]


def _ignore(memory: memoryview) -> None:
    """Do nothing: the default hook."""


class Arena:
    """A slot file and its mapping, which grows and never shrinks. ``own`` makes room for it."""

    def __init__(self, path: Path, budget: Budget, own: Own) -> None:
        self.path = path
        self._budget = budget
        self._own = own
        self._descriptor = -1
        self._mapped: MapHook = _ignore
        self._unmapping: MapHook = _ignore
        self._node: int | None = None
        self._memory: memoryview | None = None
        #: Checksums of the last published snapshot, as long as no other code has written to the pages.
        self.checksums: ArenaChecksums | None = None

    @property
    def memory(self) -> memoryview | None:
        """The whole mapping, writable; None before the first use."""
        return self._memory

    @property
    def opened(self) -> bool:
        """True if this arena has its file open."""
        return self._descriptor >= 0

    def bind(self, mapped: MapHook = _ignore, unmapping: MapHook = _ignore, node: int | None = None) -> None:
        """Call these hooks, in place of the previous ones, for the present mapping and all later ones.

        Every mapping is passed to ``mapped`` once, and to ``unmapping`` before it goes away, so that a device
        can unlock its pages in time. Pages are taken from the memory of ``node``, unless it is None.
        """
        memory = self._memory
        self._unmap()
        self._mapped, self._unmapping, self._node = mapped, unmapping, node
        if memory is not None:
            self._announce(memory)

    def ensure(self, nbytes: int, *, ahead: bool = False) -> memoryview:
        """Return a mapping of at least ``nbytes`` with every page present.

        With ``ahead``, no other store is asked to make room. ``RamDiskFullError`` if there is no room;
        ``EnvironmentUnusableError`` if the file cannot be mapped or page-locked. Then a file created by this
        call is removed, and an older one is unchanged.
        """
        if self._memory is not None and len(self._memory) >= nbytes:
            return self._memory
        made = not self.path.exists()
        length = self.extend_file(align(nbytes, STEP_BYTES), ahead=ahead)
        try:
            self._unmap()
            with self._budget.taking(length):
                memory = map_file(self._descriptor, length, writable=True)
                populate(view_address(memory), length)
            return self._announce(memory)
        except BaseException:
            if made:
                self.discard(pieces=False)
            raise

    def extend_file(self, nbytes: int, *, ahead: bool = False) -> int:
        """Make the file at least ``nbytes`` long without touching the mapping. Return its length.

        All pages of a file that was opened here exist; those that a dead process left may not.
        """
        own = None if ahead else self._own
        if self._descriptor >= 0:
            length = os.fstat(self._descriptor).st_size
            if length >= nbytes:
                return length
            with near(self._node):
                return self._budget.extend(self._descriptor, nbytes, allocated_bytes=length, own=own)
        made = not self.path.exists()
        descriptor = open_checked(self.path, os.O_RDWR | os.O_CREAT)
        try:
            with near(self._node):
                length = self._budget.extend(descriptor, nbytes, own=own)
        except BaseException:
            os.close(descriptor)
            if made:
                self.path.unlink()
            raise
        self._descriptor = descriptor
        return length

    def write(self, data: bytes, position: int) -> None:
        """Write through the file, also beyond the mapping; both show the same pages.

        If the file system survives a power cut, all earlier writes to file and mapping are then on the
        medium. ``RamDiskFullError`` if a file system that copies on write has no room even for existing
        pages.
        """
        with self._budget.taking(len(data)):
            write_at(self._descriptor, data, position)
            os.fsync(self._descriptor)

    def tear(self) -> None:
        """Overwrite the ends of the open file, so that a half-written file never looks like a snapshot.

        This includes the trailer: a later, whole snapshot in the same file would otherwise seem to be in
        pieces.
        """
        self.write(bytes(PREAMBLE_BYTES), 0)
        length = os.fstat(self._descriptor).st_size
        self.write(bytes(len(TRAILER_MAGIC)), max(0, length - TRAILER_BYTES))

    def _announce(self, memory: memoryview) -> memoryview:
        """Pass a new mapping to the hooks, then use it."""
        self._mapped(memory)
        self._memory = memory
        return memory

    def _unmap(self) -> None:
        """Withdraw the mapping. Views that are still held keep its pages."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            self.checksums = None
            self._unmapping(memory)

    def close(self) -> None:
        """Withdraw the mapping and close the file, even if the unmap hook raises. The file stays."""
        try:
            self._unmap()
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def discard(self, *, pieces: bool = True) -> None:
        """Withdraw the mapping, free its pages and remove the file, with ``pieces`` also its pieces.

        Views that are still held then read zeros. Without freeing, forked children, which inherit the
        mapping, would keep the pages.
        """
        memory = self._memory
        self.close()
        if memory is not None:
            with suppress(
                OSError
            ):  # some file systems cannot; the pages are then freed with the last mapping
                remove(memory)
        self.path.unlink(missing_ok=True)
        if pieces:
            remove_pieces(self.path)
