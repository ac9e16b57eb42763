"""Locks on devices for the whole host: two schedulers never give the same device away.

Every user has a lock file of their own per device, in a directory that all users share. A scheduler locks its
user's files, then looks whether a lock of another user's file is held. So nobody needs to write, and nobody
can remove, what belongs to somebody else: the directory is sticky.

The locks are POSIX record locks. The kernel drops them with the process that took them, whatever ends that,
and its children never have them. They do not tell two schedulers of one process apart.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import NamedTuple

import msgspec

from gpuslice import config
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.launch.visible_gpus import VISIBLE, visible
from gpuslice.types import DeviceName

_PREFIX = "gpuslice-device"
#: A killed scheduler of the same directory is waited for so long: the kernel may not be done with it.
_GONE_WITHIN_S = 10.0
_LOOK_AGAIN_S = 0.05
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_MOST_BYTES = 8192


class Holder(msgspec.Struct, frozen=True):
    """The scheduler that has a device locked, as its lock file describes it.

    Attributes
    ----------
    pid
        The scheduler's process, in its own PID namespace.
    directory
        Its state directory.
    host
        The name of the machine or container that it runs in.
    """

    pid: int = 0
    directory: str = ""
    host: str = ""


class _Taken(NamedTuple):
    """A device that another scheduler has."""

    device: DeviceName
    user: int
    holder: Holder

    @property
    def who(self) -> str:
        """Return the holder in words."""
        where = f" in {_printable(self.holder.directory)}" if self.holder.directory else ""
        on = f" on {_printable(self.holder.host)}" if self.holder.host not in ("", _host()) else ""
        return f"process {self.holder.pid or 'unknown'} of user {_user_name(self.user)}{where}{on}"


class Locks:
    """The locks that the scheduler of ``directory`` has taken. ``devices`` end with it."""

    def __init__(self, directory: Path) -> None:
        self._own = Holder(os.getpid(), os.path.realpath(directory), _host())
        self._folder: int | None = None
        self._taken: dict[DeviceName, ExitStack] = {}

    def take(self, devices: Sequence[DeviceName]) -> None:
        """Lock ``devices``, too: all, or none. Raise as ``held`` does."""
        wanted = _by_key([device for device in devices if not device.node and device.kind != "null"])
        if not wanted:
            return
        if self._folder is None:
            self._folder = _open_directory(config.lock_directory())
        new = {device: ExitStack() for device in wanted.values()}
        try:
            found = (_take(new[one], self._folder, key, one, self._own) for key, one in wanted.items())
            if taken := [one for one in found if one is not None]:
                raise _refusal(taken)
        except BaseException:
            for stack in new.values():
                stack.close()
            raise
        self._taken |= new

    def release(self, device: DeviceName) -> None:
        """Let others have ``device``, if it was locked."""
        if (stack := self._taken.pop(device, None)) is not None:
            stack.close()

    def close(self) -> None:
        """Release all devices."""
        for device in list(self._taken):
            self.release(device)
        if self._folder is not None:
            os.close(self._folder)


@contextmanager
def held(directory: Path, devices: Sequence[DeviceName]) -> Iterator[Locks]:
    """Hold the locks of ``devices`` on this machine within the context, for the scheduler of ``directory``.

    Parameters
    ----------
    directory
        The scheduler's, whose own lock is held already.

    Raises
    ------
    EnvironmentUnusableError
        If another scheduler has one of them, or the lock directory cannot be used.
    """
    locks = Locks(directory)
    try:
        locks.take(devices)
        yield locks
    finally:
        locks.close()


def _by_key(devices: Sequence[DeviceName]) -> dict[str, DeviceName]:
    """Return devices by the name of their lock file: a GPU's UUID, or a slot's number."""
    gpus: Sequence[str] = ()
    if any(device.kind == "cuda" for device in devices):
        gpus = _gpu_keys()
    found = {}
    for device in devices:
        number = device.index or 0
        known = device.kind == "cuda" and number < len(gpus)
        found[gpus[number] if known else f"{device.kind}-{number}"] = device
    return found


def _gpu_keys() -> list[str]:
    """Return UUIDs of the visible GPUs. Without NVML, return what ``CUDA_VISIBLE_DEVICES`` names them."""
    from gpuslice.kernels.nvml import read_driver

    gpus = [gpu.uuid or f"cuda-{gpu.index}" for gpu in visible(read_driver().gpus, os.environ)]
    shown = [f"cuda-{word.strip()}" for word in os.environ.get(VISIBLE, "").split(",") if word.strip()]
    return [re.sub(r"[^A-Za-z0-9-]", "_", key) for key in gpus or shown]


def _open_directory(path: Path) -> int:
    """Open the lock directory. Make it first if ``GPUSLICE_LOCK_DIR`` names one that is missing."""
    remedy = f"set {config.LOCK_DIR} to a directory that all users of the devices share"
    try:
        if os.environ.get(config.LOCK_DIR):
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise EnvironmentUnusableError(
            f"the lock directory {path} cannot be used: {error.strerror}", remedy
        ) from error
    status = os.fstat(descriptor)
    problem = ""
    if not _is_trusted(status.st_uid):
        problem = f"belongs to user {_user_name(status.st_uid)}, who could remove locks"
    elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        problem = f"has mode {mode:04o}: others could remove locks unless it is sticky (chmod +t)"
    if problem:
        os.close(descriptor)
        raise EnvironmentUnusableError(f"the lock directory {path} {problem}", remedy)
    return descriptor


def _is_trusted(uid: int) -> bool:
    """Return True if a directory's owner is this user or root. In some user namespaces root is ``nobody``."""
    if uid in (0, os.geteuid()):
        return True
    everybody = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    return not everybody and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())


def _take(locks: ExitStack, folder: int, key: str, device: DeviceName, own: Holder) -> _Taken | None:
    """Take the lock of a device until ``locks`` ends. Return who has it if somebody else has."""
    taken = _attempt(locks, folder, key, device, own)
    for _ in range(round(_GONE_WITHIN_S / _LOOK_AGAIN_S)):
        if taken is None or (taken.user, taken.holder.directory) != (os.geteuid(), own.directory):
            break
        Event().wait(_LOOK_AGAIN_S)  # this scheduler's predecessor, which has been killed
        taken = _attempt(locks, folder, key, device, own)
    return taken


def _attempt(locks: ExitStack, folder: int, key: str, device: DeviceName, own: Holder) -> _Taken | None:
    """Take the lock of a device once, or return who has it."""
    name = f"{_PREFIX}.{key}.{os.geteuid()}"
    while True:
        with ExitStack() as attempt:
            descriptor = _open_own(folder, name)
            attempt.callback(os.close, descriptor)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise _unusable(name, error) from error
                return _Taken(device, os.geteuid(), _holder(descriptor))
            if not _is_named(folder, name, descriptor):
                continue  # its last holder has just removed it
            attempt.callback(_remove, folder, name)
            os.ftruncate(descriptor, 0)
            if others := _held_by_others(folder, key, name, device):
                return others
            os.pwrite(descriptor, msgspec.json.encode(own), 0)
            locks.push(attempt.pop_all())
            return None


def _open_own(folder: int, name: str) -> int:
    """Open this user's lock file of a device; make it if there is none. Others may read it."""
    while True:
        try:
            descriptor = os.open(name, os.O_RDWR | _OPEN, dir_fd=folder)
        except FileNotFoundError:
            try:
                descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o644, dir_fd=folder)
                os.fchmod(descriptor, 0o644)  # whatever the umask
            except FileExistsError:
                continue  # another scheduler of this user has just made it
            except OSError as error:
                raise _unusable(name, error) from error
        except OSError as error:
            raise _unusable(name, error) from error
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return descriptor
        os.close(descriptor)
        raise EnvironmentUnusableError(
            f"the lock file {config.lock_directory() / name} is not yours alone: it belongs to user "
            f"{_user_name(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):04o}",
            f"have it removed, or name another lock directory: {config.LOCK_DIR}",
        )


def _unusable(name: str, error: OSError) -> EnvironmentUnusableError:
    return EnvironmentUnusableError(
        f"cannot use the lock file {config.lock_directory() / name}: {error.strerror}",
        f"remove what is there, or name another lock directory: {config.LOCK_DIR}",
    )


def _is_named(folder: int, name: str, descriptor: int) -> bool:
    """Return True if the open file is still the one of that name."""
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _remove(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):  # somebody has cleaned up
        os.unlink(name, dir_fd=folder)


def _held_by_others(folder: int, key: str, own: str, device: DeviceName) -> _Taken | None:
    """Return who else has the device, by another user's file of it."""
    for name in os.listdir(folder):
        if name == own or not name.startswith(f"{_PREFIX}.{key}."):
            continue
        try:
            descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ELOOP:
                continue  # a link is nobody's lock
            raise EnvironmentUnusableError(
                f"cannot see whether another user has {device}: {config.lock_directory() / name}: "
                f"{error.strerror}",
                f"have the file removed, or name another lock directory: {config.LOCK_DIR}",
            ) from error
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and _lock_owner(descriptor) is not None:
                return _Taken(device, status.st_uid, _holder(descriptor))
        finally:
            os.close(descriptor)
    return None


def _lock_owner(descriptor: int) -> int | None:
    """Return the process that has the file locked, 0 if it is of another PID namespace, None if none has."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def _holder(descriptor: int) -> Holder:
    """Return who has the file locked: the process as the kernel says, the rest as the file says."""
    try:
        written = msgspec.json.decode(os.pread(descriptor, _MOST_BYTES, 0), type=Holder)
    except (msgspec.DecodeError, ValueError):
        written = Holder()  # it has only begun, or is no file of ours
    return msgspec.structs.replace(written, pid=_lock_owner(descriptor) or written.pid)


def _refusal(taken: Sequence[_Taken]) -> EnvironmentUnusableError:
    """Return the error that names every device that another scheduler has, and that scheduler."""
    named: dict[str, list[DeviceName]] = {}
    for one in taken:
        named.setdefault(one.who, []).append(one.device)
    parts = []
    for who, devices in named.items():
        have = "has" if len(devices) == 1 else "have"
        parts.append(f"{', '.join(map(str, devices))} {have} a scheduler already: {who}")
    directory = taken[0].holder.directory
    own = taken[0].user == os.geteuid() and directory
    remedy = f"use that one (--state-dir {_printable(directory)})" if own else "use that one"
    return EnvironmentUnusableError("; ".join(parts), f"{remedy}, have it ended, or name other devices")


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _host() -> str:
    return os.uname().nodename
