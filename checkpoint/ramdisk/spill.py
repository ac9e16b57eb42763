"""Cold snapshots on a file system that is slower and larger than the RAM disk.

A snapshot is cold when its job is parked or its process dead. It is moved whole: written to the spill
directory under a temporary name, read back and verified, renamed, and only then removed from the RAM disk. If
that is interrupted, the snapshot is whole in one of the two places, or the same in both. It is read where it
lies.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuslice.checkpoint.files import flush_directory, write_at, writing
from gpuslice.checkpoint.format.gsnp import Record
from gpuslice.checkpoint.format.reader import DAMAGED, SnapshotFile, open_snapshot, record_of
from gpuslice.checkpoint.locks import FileLock
from gpuslice.config import format_size
from gpuslice.errors import (
    CorruptSnapshotError,
    RamDiskFullError,
    SnapshotError,
)
from gpuslice.files import private_directory

from .slots import SLOTS

_PARTIAL = ".part"
_LOCK = "lock"
#: Large enough for full speed of an NVMe drive with one request at a time.
_PIECE_BYTES = 8 << 20
#: How often a move that waits for another one checks whether to go on.
_LOOK_AGAIN_S = 0.02
_OPTION = "--spill-dir"
_FILE = re.compile(rf"(?P<store>.+\.r\d+)\.(?P<slot>{'|'.join(map(re.escape, SLOTS))})")


class Interrupted(Exception):
    """The error of a move to the spill directory that was called off. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Spilled:
    """A snapshot in the spill directory, by the store and the slot that it came from."""

    store: str
    slot: int
    path: Path

    def size_bytes(self) -> int:
        """Return the file's size; 0 if it was removed meanwhile."""
        try:
            return self.path.lstat().st_size
        except FileNotFoundError:
            return 0

    def record(self) -> Record:
        """Return the snapshot's record. Only the record is checked. Raises ``SnapshotError``."""
        record = record_of(self.path)
        if record.slot != self.slot:
            raise CorruptSnapshotError(f"{self.path} is a snapshot of another slot", DAMAGED)
        return record

    def is_useless(self) -> bool:
        """Return True if the snapshot is readable and not restartable."""
        try:
            return not self.record().restartable
        except SnapshotError:
            return False


#: Called again and again during a move; raises `Interrupted` to call it off.
Pause = Callable[[], object]


def carry_on() -> None:
    """Do nothing: the default check, which never calls a move off."""


class SpillDirectory:
    """A private directory of spilled snapshots: ``<job>.r<rank>.<A or B>.gsnp``, each one GSNP/2 file.

    Parameters
    ----------
    directory
        Made with mode 0700 when missing.
    limit_bytes
        Most bytes that all snapshots here may take; ``None`` for what the file system has.

    Raises
    ------
    EnvironmentUnusableError
        If it is a link, another user's, open to others, or cannot be made.
    """

    def __init__(self, directory: Path, limit_bytes: int | None = None) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        private_directory(directory, option=_OPTION, parents=True)

    def path(self, store: str, slot: int) -> Path:
        """Return the path of a slot's snapshot here. It need not exist."""
        return self.directory / f"{store}.{SLOTS[slot]}"

    def entries(self, store: str | None = None) -> list[Spilled]:
        """Return the snapshots here, of one store or of all, by name."""
        matches = map(_FILE.fullmatch, sorted(os.listdir(self.directory)))
        found = (
            Spilled(match["store"], SLOTS.index(match["slot"]), self.directory / match[0])
            for match in matches
            if match is not None
        )
        return [entry for entry in found if store is None or entry.store == store]

    def records(self, store: str) -> list[Record]:
        """Return the records of a store's readable snapshots here."""
        found = []
        for entry in self.entries(store):
            with suppress(SnapshotError):
                found.append(entry.record())
        return found

    def used_bytes(self) -> int:
        """Return the bytes of all snapshots here."""
        return sum(entry.size_bytes() for entry in self.entries())

    @property
    def free_bytes(self) -> int:
        """Bytes that its file system still has."""
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize

    def arriving(self, store: str) -> bool:
        """Return True if a snapshot of the store is being written here, or was when its process died."""
        return any(_partial(self.path(store, slot)).exists() for slot in range(len(SLOTS)))

    def take(self, source: Path, store: str, slot: int, pause: Pause = carry_on) -> None:
        """Write a snapshot file here. It is whole and on the medium when this returns. The source stays.

        Raises
        ------
        CorruptSnapshotError
            If the source is damaged, or what was written does not read back.
        RamDiskFullError
            If there is no room here.
        Interrupted
            If ``pause`` raises it.
        """
        target = self.path(store, slot)
        partial = _partial(target)
        with open_snapshot(source) as snapshot:
            snapshot.verify(pause)
            memory = snapshot.arena
        with self._lock(pause):
            self._admit(len(memory))
            try:
                with writing(self.directory, _OPTION, self._full):
                    _write(partial, memory, pause)
                    with open_snapshot(partial) as written:
                        written.verify(pause)
                    os.replace(partial, target)
                    flush_directory(self.directory)
            finally:
                partial.unlink(missing_ok=True)

    def open(self, store: str, record: Record) -> SnapshotFile:
        """Open the snapshot of ``record`` here, with every byte verified. Raises ``SnapshotError``."""
        snapshot = open_snapshot(self.path(store, record.slot))
        if snapshot.record != record:  # the record vouches for the checksums, and they for the rest
            raise CorruptSnapshotError(
                f"{snapshot.path} is another snapshot than the one that was spilled", DAMAGED
            )
        snapshot.verify()
        return snapshot

    def clean_store(self, store: str) -> None:
        """Remove half-written files of a store's former process. The caller holds the store's lock."""
        for slot in range(len(SLOTS)):
            _partial(self.path(store, slot)).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove half-written files of all processes that died while writing."""
        with FileLock.wait(self.directory / _LOCK):
            for partial in self.directory.glob(f"*{_PARTIAL}"):
                partial.unlink(missing_ok=True)

    def drop(self, store: str, slot: int) -> None:
        """Remove a snapshot from here, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(self.path(store, slot))
            flush_directory(self.directory)

    def _lock(self, pause: Pause) -> FileLock:
        """Return the lock under which snapshots are written, one after the other. Others may take long."""
        while (lock := FileLock.attempt(self.directory / _LOCK)) is None:
            pause()
            time.sleep(_LOOK_AGAIN_S)
        return lock

    def _admit(self, nbytes: int) -> None:
        """Raise ``RamDiskFullError`` if ``nbytes`` would exceed the limit. The caller holds the lock."""
        used = self.used_bytes()
        if self.limit_bytes is not None and used + nbytes > self.limit_bytes:
            raise RamDiskFullError(
                f"the spill directory {self.directory} is full: {format_size(nbytes)} more would be needed, "
                f"{format_size(used)} of {format_size(self.limit_bytes)} are used",
                "raise --spill-limit, or run `gpuslice ramdisk gc`",
            )

    def _full(self) -> RamDiskFullError:
        return RamDiskFullError(
            f"the spill directory {self.directory} is full", f"make room there, or choose another {_OPTION}"
        )


def is_whole(path: Path) -> bool:
    """Return True if the file holds a snapshot whose bytes all have their checksums."""
    try:
        with open_snapshot(path) as snapshot:
            snapshot.verify()
    except SnapshotError:
        return False
    return True


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}{_PARTIAL}")


def _write(target: Path, memory: memoryview, pause: Pause) -> None:
    """Write a snapshot's file to the medium, past the page cache where possible.

    All writes are aligned for O_DIRECT: a snapshot's file is a multiple of 4 KiB long.
    """
    target.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(target, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Such a file system (tmpfs, some network ones) has no O_DIRECT, but may have created the file.
        target.unlink(missing_ok=True)
        descriptor = os.open(target, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, len(memory))
        for position in range(0, len(memory), _PIECE_BYTES):
            pause()
            write_at(descriptor, memory[position : position + _PIECE_BYTES], position)
        os.fdatasync(descriptor)
        # So that the verification reads from the medium.
        os.posix_fadvise(descriptor, 0, len(memory), os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
