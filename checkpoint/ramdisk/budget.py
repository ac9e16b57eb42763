"""How many bytes the RAM disk holds, and whether more fit. The sizes of the files are the only record.

Counting files instead of keeping a ledger survives every kind of death. A file with several names, which
stores share, counts once. A file counts with its full length as soon as it is extended, before its pages
exist, so of two processes that race for the last bytes exactly one wins. The owner file beside them names the
tenant whose bytes they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuslice.checkpoint.files import RAMDISK_DIR_OPTION, more_room, writing
from gpuslice.checkpoint.locks import FileLock
from gpuslice.config import format_size
from gpuslice.errors import RamDiskFullError
from gpuslice.memory import UNLIMITED_BYTES, available_bytes

from .slots import read_owner

_BLOCK_BYTES = 512

Own = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of jobs that share a limit of their own.

    Attributes
    ----------
    name
        Empty for jobs without a tenant.
    limit_bytes
        Most bytes that all its stores may take together; ``None`` for no limit but the RAM disk's.
    """

    name: str = ""
    limit_bytes: int | None = None


NOBODY = Tenant()


class Budget:
    """The limits of the RAM disk and of one tenant, and the lock under which they are applied.

    Parameters
    ----------
    root
        The RAM disk's directory.
    limit_bytes
        Most bytes all files below it may have together; ``None`` for half of the file system.
    tenant
        The tenant for whom bytes are admitted.
    """

    def __init__(self, root: Path, limit_bytes: int | None, tenant: Tenant = NOBODY) -> None:
        self.root = root
        self.tenant = tenant
        #: Makes room, step by step, by spilling stores that help, given their directories,
        #: and by the ``own`` of `extend`.
        self.relief: Callable[[Callable[[Path], bool], Own], Iterator[None]] | None = None
        status = os.statvfs(root)
        #: True if no limit was given, so that it is half of the file system.
        self._halves = limit_bytes is None
        self.limit_bytes = status.f_blocks * status.f_frsize // 2 if limit_bytes is None else limit_bytes

    def lock(self) -> FileLock:
        """Return the RAM disk's lock, held for admission, and while stores come and go."""
        return FileLock.wait(self.root / "lock")

    def used_bytes(self) -> int:
        """Return the bytes that all stores together hold or have reserved."""
        return held_bytes(self._directories())

    def tenant_bytes(self) -> int:
        """Return the bytes that belong to the tenant's jobs, dead ones included."""
        return held_bytes(filter(self._is_ours, self._directories()))

    def _is_ours(self, directory: Path) -> bool:
        owner = read_owner(directory)
        return owner is not None and owner.tenant == self.tenant.name

    def room_bytes(self) -> int:
        """Return the bytes that limits, file system and memory together still allow."""
        return min(self.limit_bytes - self.used_bytes(), self.free_bytes(), self._tenant_room())

    def _tenant_room(self) -> int:
        limit_bytes = self.tenant.limit_bytes
        return UNLIMITED_BYTES if limit_bytes is None else limit_bytes - self.tenant_bytes()

    def _directories(self) -> list[Path]:
        with os.scandir(self.root) as stores:
            return [Path(store.path) for store in stores if store.is_dir(follow_symlinks=False)]

    def free_bytes(self) -> int:
        """Return the bytes that file system and memory can still give, without reserved ones."""
        status = os.statvfs(self.root)
        files = _files(self._directories())
        promised = sum(max(0, s.st_size - s.st_blocks * _BLOCK_BYTES) for s in files)
        free = min(status.f_bavail * status.f_frsize, available_bytes())
        return max(0, free - promised)

    def extend(
        self, descriptor: int, nbytes: int, *, allocated_bytes: int = 0, own: Own | None = None
    ) -> int:
        """Make the open file at least ``nbytes`` long, with every page allocated. Return the new length.

        Pages of the first ``allocated_bytes`` exist already, or are not needed. ``own`` frees this store's
        other slot and returns True if it freed any; without ``own`` no store is asked for room.
        ``RamDiskFullError`` if a limit, file system or memory forbid it; the file is then unchanged.
        """
        try:
            return self._extend(descriptor, nbytes, allocated_bytes)
        except RamDiskFullError as error:
            if self.relief is None or own is None:
                raise
            refusal = error
        growth = nbytes - os.fstat(descriptor).st_size

        def helps(directory: Path) -> bool:
            return growth <= self._tenant_room() or self._is_ours(directory)

        for _ in self.relief(helps, own):
            try:
                return self._extend(descriptor, nbytes, allocated_bytes)
            except RamDiskFullError as error:
                refusal = error
        raise refusal

    def _extend(self, descriptor: int, nbytes: int, allocated_bytes: int) -> int:
        with self.lock():
            before = os.fstat(descriptor).st_size
            if before < nbytes:
                if nbytes - before > self.room_bytes():
                    raise self.full(nbytes - before)
                with self.taking(nbytes - before):
                    os.ftruncate(descriptor, nbytes)
            after = os.fstat(descriptor).st_size
        try:
            with self.taking(after - before):
                if after > allocated_bytes:
                    os.posix_fallocate(descriptor, allocated_bytes, after - allocated_bytes)
        except BaseException:
            # Keep no length without pages: touching a missing one ends in SIGBUS.
            os.ftruncate(descriptor, before)
            raise
        return after

    def taking(self, nbytes: int) -> AbstractContextManager[None]:
        """Return a context that turns the system's refusal of ``nbytes`` into an error of gpuslice's own.

        ``RamDiskFullError``, or ``EnvironmentUnusableError`` if the file system cannot do what is needed.
        """
        return writing(self.root, RAMDISK_DIR_OPTION, partial(self.full, nbytes))

    def full(self, growth: int) -> RamDiskFullError:
        """Return the error for ``growth`` bytes that did not fit."""
        if growth > self._tenant_room():
            return self._tenant_full(growth)
        used, free = format_size(self.used_bytes()), format_size(self.free_bytes())
        return RamDiskFullError(
            f"the RAM disk {self.root} is full: {format_size(growth)} more would be needed,"
            f" {used} of {format_size(self.limit_bytes)} are used and {free} of memory are free",
            self._remedy(growth),
        )

    def _remedy(self, growth: int) -> str:
        """Return the remedy for the limit, file system or memory that has no room."""
        status = os.statvfs(self.root)
        if growth > status.f_bavail * status.f_frsize:
            return more_room(self.root)
        if growth > available_bytes():
            return f"free some memory, or choose a directory on a disk: {RAMDISK_DIR_OPTION}"
        if self._halves and self.used_bytes() + growth > 2 * self.limit_bytes:  # no limit suffices
            return more_room(self.root)
        return (
            "raise --ramdisk-limit (GPUSLICE_RAMDISK_LIMIT; half of the file system if it is not given), "
            "or run `gpuslice ramdisk gc`"
        )

    def _tenant_full(self, growth: int) -> RamDiskFullError:
        name, limit_bytes = self.tenant.name, self.tenant.limit_bytes or 0
        return RamDiskFullError(
            f"tenant {name} has no room in the RAM disk {self.root}: {format_size(growth)} more would be"
            f" needed, {format_size(self.tenant_bytes())} of its {format_size(limit_bytes)} are used",
            f"raise `gpuslice up --tenant-ramdisk {name}=BYTES`, or run `gpuslice ramdisk gc`",
        )


def directory_bytes(directory: Path) -> int:
    """Return the bytes that one store holds or has reserved. A file with several names counts in parts."""
    return sum(_size(status) // max(1, status.st_nlink) for status in _statuses(directory))


def held_bytes(directories: Iterable[Path]) -> int:
    """Return the bytes that all files of these stores hold or have reserved. Shared files count once."""
    return sum(map(_size, _files(directories)))


def _size(status: os.stat_result) -> int:
    return max(status.st_size, status.st_blocks * _BLOCK_BYTES)


def _files(directories: Iterable[Path]) -> Collection[os.stat_result]:
    """Return the status of every file of these stores; once for a file with several names."""
    return {status.st_ino: status for directory in directories for status in _statuses(directory)}.values()


def _statuses(directory: Path) -> Iterator[os.stat_result]:
    """Yield the status of every file directly in ``directory``, without those that vanish meanwhile."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                yield entry.stat(follow_symlinks=False)
