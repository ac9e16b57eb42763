"""Devices that are closed to jobs: paused, reserved for one tenant, drained, or used by foreign processes.

Begins and ends are Unix times, since people name them by the clock on the wall. The core compares them with
its own clock by the last Unix time that it was told. What has ended, or begun, by now is noted by ``expire``
alone, so that nothing changes between two events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from math import inf
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gpuslice.errors import UsageError
from gpuslice.sched_core.device_users import used_by
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.wall_time import WallTime
from gpuslice.types import DeviceName
from gpuslice.verbs import DeviceUser

#: What is so near has come: the two clocks are compared with rounding.
_ROUNDING_S = 1e-3
#: Ends so near are said with seconds.
_SECONDS_MATTER_S = 600.0


class Tenant(Protocol):
    """What is asked about a job: whose it is, and where it was last."""

    spec: JobSpec
    last_lease: tuple[int, ...]


class Reservation(NamedTuple):
    """Devices that only the jobs of ``tenant`` may have from one Unix time to another."""

    name: str
    devices: tuple[int, ...]
    begin_unix_s: float
    end_unix_s: float
    tenant: str

    def overlaps(self, other: Reservation) -> bool:
        """Return True if ``other`` has one of the same devices at the same time."""
        together = self.begin_unix_s < other.end_unix_s and other.begin_unix_s < self.end_unix_s
        return together and not set(self.devices).isdisjoint(other.devices)


class Ended(NamedTuple):
    """What ``expire`` has noted: pauses that are over, and reservations that have begun or ended."""

    unpaused: tuple[int, ...]
    begun: tuple[Reservation, ...]
    ended: tuple[Reservation, ...]


class ClosedDevices:
    """The devices that are paused, reserved, drained, or used by processes that are none of ours.

    Parameters
    ----------
    devices
        The names of all devices.
    wall
        The time of day. It is written here alone.
    """

    def __init__(self, devices: Sequence[DeviceName], wall: WallTime) -> None:
        self._names = tuple(map(str, devices))
        self._wall = wall
        self._paused: dict[int, float] = {}
        self._drained: set[int] = set()
        self._users: dict[int, tuple[DeviceUser, ...]] = {}
        #: The devices with users that jobs must leave, too.
        self._left: set[int] = set()
        self._removed: frozenset[int] = frozenset()
        self._reserved: dict[str, Reservation] = {}
        #: How many reservations there ever were.
        self._made = 0
        #: The names of the reservations whose time it is.
        self._present: set[str] = set()

    @property
    def any(self) -> bool:
        """True if a device is closed to some job now."""
        return bool(self._paused or self._drained or self._present or self._users or self._removed)

    @property
    def planned(self) -> bool:
        """True if something begins or ends at a known time."""
        return bool(self._reserved) or any(end_s < inf for end_s in self._paused.values())

    @property
    def paused(self) -> Mapping[int, float]:
        """The paused devices, and until when (Unix time; infinite: until they are unpaused); for reading."""
        return MappingProxyType(self._paused)

    @property
    def removed(self) -> frozenset[int]:
        """The devices that the scheduler is to have no more."""
        return self._removed

    @property
    def shut(self) -> frozenset[int]:
        """The devices that no job may have now."""
        return self._removed.union(self._paused, self._left)

    @property
    def users(self) -> Mapping[int, tuple[DeviceUser, ...]]:
        """The processes on devices that are none of ours, by device; for reading."""
        return MappingProxyType(self._users)

    @property
    def left(self) -> frozenset[int]:
        """The devices that jobs must leave because others use them."""
        return frozenset(self._left)

    @property
    def drained(self) -> frozenset[int]:
        """The drained devices."""
        return frozenset(self._drained)

    @property
    def restricted(self) -> frozenset[int]:
        """The devices that are closed to some jobs, and not to all."""
        if not (self._drained or self._users or self._present):
            return frozenset()
        reserved = {device for one in self.present for device in one.devices}
        return self._begun_only.union(reserved) - self.shut

    @property
    def _begun_only(self) -> frozenset[int]:
        """The devices that only jobs may have that had them last."""
        return frozenset({*self._drained, *self._users})

    @property
    def reservations(self) -> tuple[Reservation, ...]:
        """All reservations, the first to begin first."""
        return tuple(sorted(self._reserved.values(), key=lambda one: (one.begin_unix_s, one.name)))

    @property
    def endless(self) -> frozenset[int]:
        """The devices that stay closed, to some jobs at least, until somebody opens them."""
        paused = (one for one, end_s in self._paused.items() if end_s == inf)
        return self._removed.union(self._drained, self._users, paused)

    @property
    def made(self) -> int:
        """The number of reservations that there ever were."""
        return self._made

    @property
    def next_name(self) -> str:
        """The name of the next reservation."""
        return f"r{self._made + 1}"

    @property
    def present(self) -> tuple[Reservation, ...]:
        """The reservations whose time it is."""
        return tuple(one for one in self.reservations if one.name in self._present)

    def tell_time(self, unix_s: float, now: float) -> None:
        """Note that it is ``unix_s`` when the core's clock is at ``now``."""
        self._wall.read(unix_s, now)

    @property
    def _ahead_s(self) -> float:
        """Unix time minus the time of the core's clock; 0 as long as nothing needs that."""
        return self._wall.ahead_s or 0.0

    def unix_s(self, now: float) -> float:
        """Return the Unix time at ``now``."""
        return now + self._ahead_s

    # What people ask for.

    def grow(self, names: Iterable[DeviceName]) -> None:
        """Have further devices at the end."""
        self._names += tuple(map(str, names))

    def remove(self, devices: Iterable[int]) -> None:
        """Close ``devices`` for good, and open others that were removed. Pauses and drains of these end."""
        self._removed = frozenset(devices)
        self._drained -= self._removed
        for device in self._removed.intersection(self._paused):
            del self._paused[device]

    def pause(self, devices: Iterable[int], until_unix_s: float) -> None:
        """Close ``devices`` to all jobs until then. An earlier pause of them is replaced."""
        self._paused.update(dict.fromkeys(devices, until_unix_s))

    def unpause(self, devices: Iterable[int]) -> None:
        """End the pauses of ``devices``.

        Raises
        ------
        UsageError
            If one is not paused; nothing was changed.
        """
        devices = tuple(devices)
        for device in devices:
            if device not in self._paused:
                raise UsageError(f"{self._names[device]} is not paused", "`gpuslice ps` shows what is")
        for device in devices:
            del self._paused[device]

    def drain(self, devices: Iterable[int]) -> None:
        """Let no job begin on ``devices``. Jobs that are there, or were there last, go on."""
        self._drained.update(devices)

    def undrain(self, devices: Iterable[int]) -> None:
        """Let jobs begin on ``devices`` again. Raise as ``unpause`` if one is not drained."""
        devices = tuple(devices)
        for device in devices:
            if device not in self._drained:
                raise UsageError(f"{self._names[device]} is not drained", "`gpuslice ps` shows what is")
        self._drained.difference_update(devices)

    def reserve(self, reservation: Reservation) -> None:
        """Add ``reservation``.

        Raises
        ------
        UsageError
            If the name is taken, or another tenant has one of the devices at that time.
        """
        if reservation.name in self._reserved:
            raise UsageError(f"there is a reservation {reservation.name} already", "try again")
        for other in self.reservations:
            if other.tenant != reservation.tenant and other.overlaps(reservation):
                (device, *_) = sorted({*other.devices} & {*reservation.devices})
                begin, end = (at(when_s) for when_s in (other.begin_unix_s, other.end_unix_s))
                raise UsageError(
                    f"{self._names[device]} is reserved for {owner(other.tenant)} from {begin} to {end}"
                    f" ({other.name})",
                    "choose another time or another device; `gpuslice reserve --list` shows all",
                )
        self._reserved[reservation.name] = reservation
        self._made += 1

    def count_from(self, made: int) -> None:
        """Note that there have been ``made`` reservations before, whose names are not used again."""
        self._made = max(self._made, made)

    def unreserve(self, name: str) -> Reservation:
        """End the reservation ``name`` and return it. Raise ``UsageError`` if there is none."""
        if name not in self._reserved:
            raise UsageError(f"there is no reservation {name!r}", "`gpuslice reserve --list` shows all")
        self._present.discard(name)
        return self._reserved.pop(name)

    def use(
        self, devices: Iterable[int], users: Mapping[int, tuple[DeviceUser, ...]], left: Iterable[int]
    ) -> None:
        """Note the processes on ``devices`` that are none of ours: these ``users``, and no others.

        No job begins on a device with users. Jobs must leave those of ``left``.
        """
        for device in devices:
            self._users.pop(device, None)
            self._left.discard(device)
        self._users.update(users)
        self._left.update(left)

    # What that means by now.

    def expire(self, now: float) -> Ended:
        """Note what has begun and ended by ``now``, and return it."""
        unix_s = self.unix_s(now) + _ROUNDING_S
        unpaused = tuple(device for device, end_s in self._paused.items() if end_s <= unix_s)
        ended = tuple(one for one in self.reservations if one.end_unix_s <= unix_s)
        for device in unpaused:
            del self._paused[device]
        for one in ended:
            self.unreserve(one.name)
        begun = tuple(
            one for one in self.reservations if one.begin_unix_s <= unix_s and one.name not in self._present
        )
        self._present.update(one.name for one in begun)
        return Ended(unpaused, begun, ended)

    def due_s(self) -> float:
        """Return when, by the core's clock, something begins or ends next; infinite if nothing does."""
        moments_s = [end_s for end_s in self._paused.values() if end_s < inf]
        for one in self._reserved.values():
            moments_s.append(one.end_unix_s if one.name in self._present else one.begin_unix_s)
        return min(moments_s, default=inf) - self._ahead_s

    def closed_to(self, job: Tenant) -> frozenset[int]:
        """Return the devices that ``job`` may not have now."""
        if not self.any:
            return frozenset()
        reserved = {device for one in self.present if one.tenant != job.spec.tenant for device in one.devices}
        return self.shut.union(reserved, self._begun_only.difference(job.last_lease))

    def opens_unix_s(self, job: Tenant, device: int) -> float:
        """Return until when ``device`` is closed to ``job``: 0 if it is open, infinite if there is no end."""
        if device not in self.closed_to(job):
            return 0.0
        ends = [
            one.end_unix_s for one in self.present if device in one.devices and one.tenant != job.spec.tenant
        ]
        if device in self._begun_only.difference(job.last_lease) | self._left | self._removed:
            ends.append(inf)
        return max([*ends, self._paused.get(device, 0.0)])

    def reason(self, job: Tenant, device: int, now: float) -> str:
        """Return in words why ``job`` may not have ``device``, such as ``cuda:1 is paused until 14:00``."""
        name, now_unix_s = self._names[device], self.unix_s(now)
        if device in self._removed:
            return f"{name} was removed (`gpuslice set devices=...` brings it back)"
        if (end_s := self._paused.get(device)) is not None:
            until = f" until {at(end_s, now_unix_s)}" if end_s < inf else f" (`gpuslice unpause {name}`)"
            return f"{name} is paused{until}"
        for one in self.present:
            if device in one.devices and one.tenant != job.spec.tenant:
                return f"{name} is reserved for {owner(one.tenant)} until {at(one.end_unix_s, now_unix_s)}"
        if (users := self._users.get(device)) is not None:
            return f"{name} is {used_by(users, lambda unix_s: at(unix_s, now_unix_s))}"
        return f"{name} is drained (`gpuslice undrain {name}`)"


def owner(tenant: str) -> str:
    """Return the words for the jobs of ``tenant``."""
    return tenant or "jobs without a tenant"


def at(unix_s: float, now_unix_s: float | None = None) -> str:
    """Return a local time: ``14:00``, ``14:00:30`` if it is near, with the date if it is not today."""
    when = datetime.fromtimestamp(unix_s)
    if now_unix_s is None:
        return when.strftime("%Y-%m-%d %H:%M")
    now = datetime.fromtimestamp(now_unix_s)
    if when.date() != now.date():
        return when.strftime("%Y-%m-%d %H:%M")
    near = abs(when - now) < timedelta(seconds=_SECONDS_MATTER_S)
    return when.strftime("%H:%M:%S" if near else "%H:%M")
