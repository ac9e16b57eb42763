"""What the scheduler does about devices that others use: ``up --foreign`` and its companions.

The core is told who uses which device, and which of these its jobs must leave. When others have gone,
it is told that, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from gpuslice.errors import UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.device_users import alike
from gpuslice.sched_core.job import FOREIGN_GRACE_S
from gpuslice.sched_core.lifecycle.events import DevicesUsed
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.types import DeviceName
from gpuslice.verbs import DeviceUser

from .device_users import UserLook, Users, UserWatch

Mode = Literal["wait", "share", "ignore"]
#: Programs that are on a GPU and do not compete for it: displays and monitors.
IGNORED = (
    "Xorg",
    "Xwayland",
    "dcgm-exporter",
    "gnome-shell",
    "nv-hostengine",
    "nvidia-cuda-mps-server",
    "nvidia-smi",
    "nvtop",
)


@dataclass(frozen=True)
class Foreign:
    """What is to be done about devices that others use.

    Attributes
    ----------
    mode
        ``wait``: jobs that are there park, and none begins. ``share``: jobs that are there go on, and none
        begins. ``ignore``: nobody looks.
    by_device
        The modes of single devices.
    grace_s
        For how long a device must be used until jobs park for it.
    ignored
        Names of programs that do not count.
    """

    mode: Mode = "wait"
    by_device: Mapping[str, Mode] = field(default_factory=dict)
    grace_s: float = FOREIGN_GRACE_S
    ignored: frozenset[str] = frozenset(IGNORED)

    def mode_of(self, device: DeviceName) -> Mode:
        """Return the mode of ``device``."""
        return self.by_device.get(str(device), self.mode)


def parse_foreign(
    settings: Sequence[str], grace_s: float, ignored: Sequence[str], devices: Sequence[DeviceName]
) -> Foreign:
    """Return what ``--foreign``, ``--foreign-grace`` and ``--foreign-ignore`` say.

    Raises
    ------
    UsageError
        If one is no mode, or of no device.
    """
    mode: Mode = "wait"
    by_device: dict[str, Mode] = {}
    names = list(map(str, devices))
    for setting in settings:
        device, equals, word = setting.rpartition("=")
        if word not in get_args(Mode) or (equals and not device):
            raise UsageError(
                f"--foreign {setting} is not wait, share or ignore",
                "write for instance --foreign share, or --foreign cuda:2=share",
            )
        if equals and device not in names:
            raise UsageError(
                f"--foreign {setting}: there is no device {device}", f"choose of {', '.join(names)}"
            )
        if equals:
            by_device[device] = cast(Mode, word)
        else:
            mode = cast(Mode, word)
    return Foreign(mode, by_device, grace_s, frozenset({*IGNORED, *ignored}))


def preferred(devices: Sequence[DeviceName], text: str) -> tuple[DeviceName, ...]:
    """Return ``devices`` with those that ``--prefer`` names first, in its order.

    Raises
    ------
    UsageError
        If one is none of ``devices``, or is named twice.
    """
    names = [word.strip() for word in text.split(",")] if text else []
    by_name = {str(device): device for device in devices}
    for name in names:
        if name not in by_name:
            raise UsageError(
                f"--prefer {text}: {name!r} is not shared here", f"choose of {', '.join(by_name)}"
            )
        if names.count(name) > 1:
            raise UsageError(f"--prefer {text} names {name} twice", "name each once")
    return (*map(by_name.__getitem__, names), *(one for one in devices if str(one) not in names))


class ForeignUse:
    """Tells the core who else uses devices.

    Parameters
    ----------
    core
        The core; only read.
    foreign
        What is to be done.
    tell
        Has the core take an event. Returns False if it did not.
    now, unix_s
        Return the time on the core's clock, and in seconds since 1970.
    """

    def __init__(
        self,
        core: Core,
        foreign: Foreign,
        tell: Callable[[DevicesUsed], bool],
        now: Callable[[], float],
        unix_s: Callable[[], float],
    ) -> None:
        self._core, self._foreign = core, foreign
        self._tell, self._now, self._unix_s = tell, now, unix_s
        #: Since when each device is used, by the core's clock.
        self._used_since_s: dict[DeviceName, float] = {}

    def take(self, node: str, found: Users) -> None:
        """Take who uses the devices of ``node``: ``found``, by the names that they have there."""
        users, left = dict[str, tuple[DeviceUser, ...]](), []
        now = self._now()
        for device in [device for device in self._core.devices if device.node == node]:
            counted = self._counted(device, found.get(str(device.on("")), ()))
            if not counted:
                self._used_since_s.pop(device, None)
                continue
            users[str(device)] = counted
            since_s = self._used_since_s.setdefault(device, now)
            if self._foreign.mode_of(device) == "wait" and now - since_s >= self._foreign.grace_s:
                left.append(str(device))
        if not self._is_known(node, users, left):
            self._tell(DevicesUsed(node, self._unix_s(), users, tuple(left)))

    def _counted(self, device: DeviceName, users: Sequence[DeviceUser]) -> tuple[DeviceUser, ...]:
        if self._foreign.mode_of(device) == "ignore":
            return ()
        return tuple(user for user in users if user.command not in self._foreign.ignored)

    def _is_known(self, node: str, users: Users, left: Sequence[str]) -> bool:
        """Return True if the core knows about as much."""
        closed, devices = self._core.state.closed, self._core.devices
        known = {str(devices[one]): found for one, found in closed.users.items() if devices[one].node == node}
        known_left = {str(devices[one]) for one in closed.left if devices[one].node == node}
        return (
            known.keys() == users.keys()
            and known_left == set(left)
            and all(
                len(found) == len(known[name])
                and all(alike(one, other) for one, other in zip(found, known[name], strict=True))
                for name, found in users.items()
            )
        )


@contextmanager
def watched(scheduler: Scheduler, directory: Path, use: ForeignUse) -> Iterator[None]:
    """Look at this machine's devices within the context, and tell ``use`` what is found."""

    def names() -> list[str]:
        return [str(device) for device in scheduler.core.devices if not device.node]

    look = UserLook(names(), directory)
    watch = UserWatch(look)
    use.take("", watch.users)  # before any job begins
    if not look.devices:
        yield
        return
    looked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def take() -> None:
        os.eventfd_read(looked)
        look.use(names())  # some may have been added
        use.take("", watch.users)

    scheduler.register(looked, take)
    watch.looked = lambda: os.eventfd_write(looked, 1)
    watch.start()
    try:
        yield
    finally:
        watch.end()
        os.close(looked)
