"""Opening files that somebody else may have prepared: no links, regular, ours, written by nobody else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpuslice.errors import CorruptSnapshotError, EnvironmentUnusableError, RefusedSnapshotError

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_checked(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of ``path``, checked after opening so that nothing can be swapped in between.

    Raises
    ------
    FileNotFoundError
        If there is none.
    RefusedSnapshotError
        For a symbolic link, anything but a regular file, a foreign owner, or a file others may write.
    """
    try:
        descriptor = os.open(path, flags | _SAFE, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RefusedSnapshotError(f"cannot open {path}: {error.strerror}", _REMEDY) from error
    problem = _problem(os.fstat(descriptor))
    if problem:
        os.close(descriptor)
        raise RefusedSnapshotError(f"{path} {problem}", _REMEDY)
    return descriptor


_REMEDY = "give a regular file that you own and that nobody else may write"


def _problem(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return "can be written by others"
    return None


def private_directory(path: Path) -> None:
    """Make ``path`` with mode 0700, or check that it is one: ours, no link, closed to others.

    Raises
    ------
    EnvironmentUnusableError
        If it is anything else or cannot be made.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        remedy = "choose another directory with --ramdisk-dir"
        raise EnvironmentUnusableError(f"cannot make {path}: {error.strerror}", remedy) from error
    status = os.lstat(path)
    problem = None
    if not stat.S_ISDIR(status.st_mode):
        problem = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a directory"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}"
    elif status.st_mode & 0o077:
        problem = f"has mode {stat.S_IMODE(status.st_mode):04o} instead of 0700"
    if problem:
        raise EnvironmentUnusableError(
            f"{path} {problem}", "choose a new or private (0700) directory of your own with --ramdisk-dir"
        )


def read_at(descriptor: int, length: int, position: int) -> bytes:
    """Exactly ``length`` bytes at ``position``; ``CorruptSnapshotError`` where the file ends before."""
    data = bytearray()
    while len(data) < length:
        piece = os.pread(descriptor, length - len(data), position + len(data))
        if not piece:
            raise CorruptSnapshotError(f"the file ends at byte {position + len(data)}: it was truncated")
        data += piece
    return bytes(data)


def write_at(descriptor: int, data: bytes, position: int) -> None:
    """Write all of ``data`` at ``position``."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written
