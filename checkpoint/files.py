"""Open files that other users may have prepared: no links, only regular files that this user owns."""

from __future__ import annotations

import errno
import os
import socket
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gpuslice.errors import (
    CorruptSnapshotError,
    EnvironmentUnusableError,
    RamDiskFullError,
    RefusedSnapshotError,
)
from gpuslice.files import private_directory

_Owner = TypeVar("_Owner")
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_checked(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open ``path`` and return its descriptor. The checks come after opening, so no swap can fool them.

    Raises
    ------
    FileNotFoundError
        If there is none.
    RefusedSnapshotError
        For a symbolic link, anything but a regular file, a foreign owner, or a file others may write.
    RamDiskFullError
        If it is to be made and there is no room.
    EnvironmentUnusableError
        If there are no more descriptors, which says nothing of the file.
    """
    try:
        descriptor = os.open(path, flags | _SAFE, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_full(error):
            raise _no_room(path) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise EnvironmentUnusableError(
                f"cannot open {path}: {error.strerror}", "raise the limit on open files (`ulimit -n`)"
            ) from error
        cause = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise RefusedSnapshotError(f"cannot open {path}: {cause}", _REMEDY) from error
    problem = _problem(os.fstat(descriptor))
    if problem:
        os.close(descriptor)
        raise RefusedSnapshotError(f"{path} {problem}", _REMEDY)
    return descriptor


#: How to choose the RAM disk's directory: every command reads the variable, not all have the option.
RAMDISK_DIR_OPTION = "GPUSLICE_RAMDISK_DIR (or `gpuslice run --ramdisk-dir`)"
#: Default place of the RAM disk, and the place where loader workers hand over their batches.
_SHM = Path("/dev/shm")
_REMEDY = "give a regular file that you own and that nobody else may write"


def _problem(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return "can be written by others"
    return None


def store_directory(path: Path) -> None:
    """Create ``path`` as a directory private to this user, or check that it is private.

    Raises
    ------
    RamDiskFullError
        If there is no room for it.
    EnvironmentUnusableError
        If it is anything else or cannot be made.
    """
    try:
        private_directory(path, option=RAMDISK_DIR_OPTION)
    except EnvironmentUnusableError as error:
        if isinstance(error.__cause__, OSError) and is_full(error.__cause__):
            raise _no_room(path) from error
        raise


def is_full(error: OSError) -> bool:
    """Return True if the operating system reports that there is no room."""
    return error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


@contextmanager
def writing(directory: Path, option: str, full: Callable[[], RamDiskFullError]) -> Iterator[None]:
    """Run the block. Raise the error that ``full`` makes if ``directory`` has no room for what it writes.

    ``EnvironmentUnusableError`` for any other ``OSError``; ``option`` is the option that chooses another
    directory.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise full() from error
        raise EnvironmentUnusableError(
            f"cannot write in {directory}: {error.strerror}", f"choose another directory with {option}"
        ) from error


def _no_room(path: Path) -> RamDiskFullError:
    return RamDiskFullError(f"there is no room to make {path}", more_room(path.parent))


def more_room(directory: Path) -> str:
    """Return as text how to get more room in a directory's file system, or what to use instead."""
    gc = "`gpuslice ramdisk gc` removes what dead jobs have left"
    if not is_in_shared_memory(directory):
        return f"make room there, or choose another directory: {RAMDISK_DIR_OPTION}; {gc}"
    return (
        f"give {_SHM} more room (a container has 64.00 MiB unless it is started with --shm-size=8g, and "
        f"loader workers need some of it), or choose another directory: {RAMDISK_DIR_OPTION}; {gc}"
    )


def is_in_shared_memory(directory: Path) -> bool:
    """Return True if the directory, or its nearest existing parent, is on the file system of /dev/shm."""
    there = next((one for one in (directory, *directory.parents) if one.exists()), directory)
    return _SHM.exists() and there.stat().st_dev == _SHM.stat().st_dev


def shared_memory_bytes() -> int:
    """Return how many bytes /dev/shm can hold."""
    status = os.statvfs(_SHM)
    return status.f_blocks * status.f_frsize


def read_at(descriptor: int, length: int, position: int) -> bytes:
    """Return ``length`` bytes from ``position``. Raise ``CorruptSnapshotError`` if the file is shorter."""
    data = bytearray()
    while len(data) < length:
        piece = os.pread(descriptor, length - len(data), position + len(data))
        if not piece:
            raise CorruptSnapshotError(f"the file ends at byte {position + len(data)}: it was truncated")
        data += piece
    return bytes(data)


def write_at(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Write all of ``data`` at ``position``."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a short path of a socket, by its directory's descriptor: the limit is 107 bytes."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at ``path``. It replaces the socket of a dead process.

    Forked children close their copy. ``OSError`` if the socket cannot be made.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        with short_path(path) as address:
            listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    closed_in_children(listener, socket.socket.close)
    return listener


def closed_in_children(owner: _Owner, close: Callable[[_Owner], object]) -> None:
    """Make every forked child call ``close(owner)`` before anything else, as long as ``owner`` lives."""
    _inherited[owner] = close


_inherited: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def _close_in_child() -> None:
    for owner, close in list(_inherited.items()):
        close(owner)


os.register_at_fork(after_in_child=_close_in_child)


def flush_directory(directory: Path) -> None:
    """Write the names in a directory to the medium, if its file system has one."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
