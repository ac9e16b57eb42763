"""Who else uses the GPUs of this machine: processes, by NVML, that belong to none of the scheduler's jobs.

NVML tells the processes' ids of the whole machine. A process that this one cannot see, in another container
for instance, is left out: it may as well be one of our own under another id.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from gpuslice.config import variable
from gpuslice.launch.visible_gpus import visible
from gpuslice.sched_core.device_users import MOST_USERS
from gpuslice.sched_core.nodes.local_node import rank_endpoint
from gpuslice.types import DeviceName, shortened
from gpuslice.verbs import DeviceUser

#: Interval at which to look.
LOOK_S = 2.0
_NAME_CHARACTERS = 64

Users = Mapping[str, tuple[DeviceUser, ...]]


class Reader(Protocol):
    """Returns the processes on a device and their bytes there."""

    def __call__(self, device: str) -> Mapping[int, int | None]: ...


class UserLook:
    """Finds the processes on devices that are not of the scheduler's jobs.

    Parameters
    ----------
    devices
        Their names on this machine. Only GPUs have users that can be seen.
    directory
        Of the scheduler, or of this node's agent. Its jobs' processes carry the socket there in their
        environment, or descend from one that does.
    read
        Asks for the processes on a device; by default NVML.
    """

    def __init__(self, devices: Sequence[str], directory: Path, read: Reader | None = None) -> None:
        self._devices = [device for device in devices if DeviceName.parse(device).kind == "cuda"]
        self._mark = (variable("socket"), rank_endpoint(directory))
        self._read: Reader = read or (_nvml_reader(self._devices) if self._devices else _read_nothing)
        #: When each process was first seen on a device: by device, process and when the process began.
        self._seen_s: dict[tuple[str, int, float], float] = {}
        self._looked = False

    @property
    def devices(self) -> Sequence[str]:
        """The devices that are looked at."""
        return self._devices

    def use(self, devices: Sequence[str]) -> None:
        """Look at the GPUs among ``devices`` from now on. Those of before must be among them."""
        gpus = [device for device in devices if DeviceName.parse(device).kind == "cuda"]
        if gpus != self._devices:
            self._read = _nvml_reader(gpus)
            self._devices = gpus

    def look(self) -> Users:
        """Return who uses each device that is used by others."""
        found, seen_s = dict[str, tuple[DeviceUser, ...]](), dict[tuple[str, int, float], float]()
        for device in self._devices:
            users = []
            for pid, nbytes in sorted(self._read(device).items()):
                with suppress(psutil.NoSuchProcess, ValueError):  # gone, or of another container
                    process = psutil.Process(pid)
                    if pid and not self._is_ours(process):
                        key = device, pid, process.create_time()
                        since_s = time.time() if self._looked else key[2]
                        seen_s[key] = self._seen_s.get(key, since_s)
                        users.append(_user(process, nbytes, seen_s[key]))
            if users:
                found[device] = tuple(users[:MOST_USERS])
        self._seen_s, self._looked = seen_s, True
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        if process.pid == os.getpid():
            return True
        name, value = self._mark
        # A child may have another environment than the job's process that started it.
        return any(_environ(one).get(name) == value for one in (process, *process.parents()))


def _read_nothing(device: str) -> Mapping[int, int | None]:
    return {}


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):
        return {}  # another user's, and so none of ours


def _user(process: psutil.Process, nbytes: int | None, since_unix_s: float) -> DeviceUser:
    user = process.username()  # the number of a user who has no name
    user = f"u{user}" if user.isdecimal() else user
    return DeviceUser(
        pid=process.pid,
        user=user,
        command=_printable(process.name()),
        nbytes=nbytes,
        since_unix_s=since_unix_s,
    )


def _printable(name: str) -> str:
    """Return the name of a program as text for a terminal. Its owner has chosen it."""
    return shortened("".join(one if one.isprintable() else "?" for one in name), _NAME_CHARACTERS)


def _nvml_reader(devices: Sequence[str]) -> Reader:
    from gpuslice.kernels.nvml import ProcessReader, read_driver

    gpus = visible(read_driver().gpus, os.environ)
    reader = ProcessReader()
    by_name = {
        device: gpus[number]
        for device in devices
        if (number := DeviceName.parse(device).index or 0) < len(gpus)
    }
    return lambda device: reader.read(by_name[device]) if device in by_name else {}


class UserWatch(threading.Thread):
    """The thread that looks again and again. NVML may be slow to answer.

    Parameters
    ----------
    look
        What looks.

    Attributes
    ----------
    users
        What was found last.
    looked
        Called, in the thread, after each look.
    """

    def __init__(self, look: UserLook) -> None:
        super().__init__(name="device-users", daemon=True)
        self._look = look
        self.looked: Callable[[], object] = lambda: None
        self._ended = threading.Event()
        self.users = look.look()

    def run(self) -> None:
        """Look, until ``end`` is called."""
        while not self._ended.wait(LOOK_S):
            self.users = self._look.look()
            self.looked()

    def end(self) -> None:
        """Look no more. Wait until a look that is under way has ended."""
        self._ended.set()
        if self.is_alive():
            self.join()
