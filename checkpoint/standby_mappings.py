"""Slot files mapped and faulted in before they are needed: by a process that stands by for another's end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gpuslice.errors import AddressSpaceError, RefusedSnapshotError
from gpuslice.kernels.host.memory_files import map_file
from gpuslice.kernels.host.process_memory import populate, view_address

from .files import open_checked

#: How often a process that waits looks whether the files are others, or longer.
_LOOK_AGAIN_S = 1.0
_POPULATE_BYTES = 8 << 20
#: Of ``os.stat``, whatever the file system's blocks are.
_BLOCK_BYTES = 512


class StandbyMappings:
    """Mappings of files, kept up to date by a thread until `close`.

    Parameters
    ----------
    paths
        The files; those that are missing are looked for again.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        #: By file system and inode.
        self._mappings: dict[tuple[int, int], memoryview] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gpuslice-standby", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the files alone from now on; what is mapped stays for `mapping`."""
        self._closing.set()
        self._thread.join()

    def mapping(self, descriptor: int, length: int) -> memoryview | None:
        """The first ``length`` bytes of an open file, read-only, if as much of it is mapped."""
        memory = self._mappings.get(_identity(os.fstat(descriptor)))
        return None if memory is None or len(memory) < length else memory[:length]

    def _follow(self) -> None:
        while not self._closing.is_set():
            self.look()
            self._closing.wait(_LOOK_AGAIN_S)

    def look(self) -> None:
        """Map what is new, let go of what is gone; what cannot be mapped now is mapped when it is needed."""
        found: dict[tuple[int, int], memoryview] = {}
        for path in self._paths:
            with suppress(OSError, AddressSpaceError, RefusedSnapshotError):
                descriptor = open_checked(path)
                try:
                    status = os.fstat(descriptor)
                    known = self._mappings.get(_identity(status))
                    current = known is not None and len(known) == status.st_size
                    memory = known if current else self._map(descriptor, status)
                finally:
                    os.close(descriptor)
                if memory is not None:
                    found[_identity(status)] = memory
        self._mappings = found

    def _map(self, descriptor: int, status: os.stat_result) -> memoryview | None:
        """All of a file, faulted in; not one with holes, where faulting in would take room."""
        if not 0 < status.st_size <= status.st_blocks * _BLOCK_BYTES:
            return None
        memory = map_file(descriptor, status.st_size)
        address = view_address(memory)
        for start in range(0, len(memory), _POPULATE_BYTES):
            if self._closing.is_set():
                break
            populate(address + start, min(_POPULATE_BYTES, len(memory) - start), writing=False)
        return memory


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
