"""Cold snapshots on a file system that is slower and larger than the RAM disk, and back.

A snapshot is cold when its job's process is dead. It is moved whole: written to the spill directory under a
name that does not count, read back and checked against its checksums, renamed, and only then taken out of
the RAM disk; and the other way round in the same order. Whenever it is interrupted, the snapshot is whole in
one of the two places, or in both, and then they are the same.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuslice.errors import EnvironmentUnusableError, RamDiskFullError, SnapshotError
from gpuslice.private import private_directory

from .budget import Budget
from .files import is_full, open_checked
from .locks import FileLock
from .slots import SLOTS, write_commit
from .snapshot import SnapshotFile, open_snapshot

SUFFIX = ".gsnp"
_PARTIAL = ".part"
_LOCK = "lock"
#: Large enough for an NVMe drive to reach its rate with one request under way.
_PIECE_BYTES = 8 << 20
_OPTION = "--spill-dir"


class SpillDirectory:
    """A private directory of spilled snapshots: ``<job>.r<rank>.gsnp``, each one GSNP/1 file.

    Parameters
    ----------
    directory
        Made with mode 0700 when missing.

    Raises
    ------
    EnvironmentUnusableError
        If it is a link, somebody else's, open to others, or cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        private_directory(directory, option=_OPTION, parents=True)

    def path(self, store: str) -> Path:
        """Where the snapshot of the store of that name is, if it is here."""
        return self.directory / f"{store}{SUFFIX}"

    def stores(self) -> Iterator[str]:
        """Names of the stores whose snapshots are here."""
        names = sorted(entry.name for entry in os.scandir(self.directory) if entry.name.endswith(SUFFIX))
        return (name.removesuffix(SUFFIX) for name in names)

    def used_bytes(self) -> int:
        """Bytes of all snapshots here."""
        return sum(self.path(store).lstat().st_size for store in self.stores())

    def snapshot(self, store: str) -> SnapshotFile | None:
        """The snapshot of a store, opened; ``None`` if there is none, or none that can be opened."""
        try:
            return open_snapshot(self.path(store))
        except SnapshotError:
            return None

    def take(self, source: Path, store: str) -> None:
        """Write a snapshot file here, whole and on the medium when this returns; the source stays.

        Raises
        ------
        CorruptSnapshotError
            If the source is damaged, or what was written does not read back.
        RamDiskFullError
            If there is no room here.
        """
        target = self.path(store)
        partial = target.with_name(f"{target.name}{_PARTIAL}")
        with open_snapshot(source) as snapshot:
            snapshot.verify()
            length = snapshot.record.file_len
        with FileLock.wait(self.directory / _LOCK):
            try:
                _copy(source, partial, length)
                with open_snapshot(partial) as written:
                    written.verify()
                os.replace(partial, target)
                _sync_directory(self.directory)
            except OSError as error:
                raise self._refusal(error) from error
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(partial)

    def give_back(self, store: str, directory: Path, budget: Budget) -> None:
        """Put a snapshot back into the RAM disk's store ``directory``, which is locked and has none as new.

        Raises
        ------
        CorruptSnapshotError
            If it was damaged here; it stays where it is.
        RamDiskFullError
            If the RAM disk has no room; it stays where it is.
        """
        source = self.path(store)
        with open_snapshot(source) as snapshot:
            snapshot.verify()
            record = snapshot.record
            target = directory / SLOTS[record.slot]
            descriptor = open_checked(target, os.O_RDWR | os.O_CREAT)
            try:
                budget.extend(descriptor, record.file_len)
                with budget.taking(record.file_len):
                    os.ftruncate(descriptor, record.file_len)
                    _fill(descriptor, source, record.file_len)
                with open_snapshot(target) as written:
                    written.verify()
                with budget.taking(0):
                    write_commit(directory, record)
            except BaseException:
                os.unlink(target)
                raise
            finally:
                os.close(descriptor)
        self.drop(store)

    def clean(self) -> None:
        """Remove what a process left that died while it wrote."""
        with FileLock.wait(self.directory / _LOCK):
            for partial in self.directory.glob(f"*{_PARTIAL}"):
                os.unlink(partial)

    def drop(self, store: str) -> None:
        """Remove a store's snapshot from here."""
        os.unlink(self.path(store))
        _sync_directory(self.directory)

    def _refusal(self, error: OSError) -> RamDiskFullError | EnvironmentUnusableError:
        if is_full(error):
            return RamDiskFullError(
                f"the spill directory {self.directory} is full",
                f"make room there, or choose another {_OPTION}",
            )
        return EnvironmentUnusableError(
            f"cannot write in {self.directory}: {error.strerror}", f"choose another directory with {_OPTION}"
        )


def _copy(source: Path, target: Path, length: int) -> None:
    """Copy ``length`` bytes to a new file and have them on the medium; past the page cache where possible."""
    with suppress(FileNotFoundError):
        os.unlink(target)
    descriptor = _create(target)
    try:
        os.posix_fallocate(descriptor, 0, length)
        _fill(descriptor, source, length)
        os.fdatasync(descriptor)
        # What is read back afterwards comes from the medium.
        os.posix_fadvise(descriptor, 0, length, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _create(target: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(target, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Such a file system (tmpfs, some network ones) has no way past its cache.
    with suppress(FileNotFoundError):
        os.unlink(target)
    return os.open(target, flags, 0o600)


def _fill(descriptor: int, source: Path, length: int) -> None:
    """Write the first ``length`` bytes of ``source``; everything aligned as O_DIRECT wants it.

    A snapshot's file is a multiple of 4 KiB long.
    """
    reading = open_checked(source)
    buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
    try:
        for position in range(0, length, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, length - position)]
            if os.preadv(reading, [piece], position) != len(piece):
                raise OSError(errno.EIO, f"{source} became shorter")
            done = 0
            while done < len(piece):
                done += os.pwrite(descriptor, piece[done:], position + done)
    finally:
        os.close(reading)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
