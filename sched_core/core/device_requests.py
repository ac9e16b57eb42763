"""Requests about devices: to pause, drain or reserve them, and to end that; and who else uses them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gpuslice.errors import UsageError
from gpuslice.sched_core.device_users import used_by
from gpuslice.sched_core.jobs.closed_devices import Ended, Reservation, at
from gpuslice.sched_core.lifecycle.events import (
    Clocked,
    DeviceRequest,
    DevicesUsed,
    Drained,
    Notice,
    Paused,
    Reserved,
    Undrained,
    Unpaused,
    Unreserved,
)
from gpuslice.sched_core.lifecycle.state import State


def apply(state: State, event: DeviceRequest | Clocked | DevicesUsed, now: float) -> None:
    """Note what ``event`` says about devices, and what has begun and ended by now.

    Raises
    ------
    UsageError
        If the request is impossible; nothing was changed.
    """
    closed = state.closed
    match event:
        case Clocked():
            closed.tell_time(event.unix_s, now)
        case Paused():
            devices = _devices(state, event.devices)
            until_unix_s = inf if event.until_unix_s is None else event.until_unix_s
            closed.tell_time(event.unix_s, now)
            closed.pause(devices, until_unix_s)
        case Unpaused():
            closed.unpause(_devices(state, event.devices))
        case Drained():
            closed.drain(_devices(state, event.devices))
        case Undrained():
            closed.undrain(_devices(state, event.devices))
        case Reserved():
            _reserve(state, event, now)
        case Unreserved():
            closed.unreserve(event.reservation)
        case DevicesUsed():
            _use(state, event, now)
    expire(state, now)


def expire(state: State, now: float) -> bool:
    """Note, and tell people, what has begun and ended by ``now``. Return True if anything has."""
    found = state.closed.expire(now)
    for what, devices, details in _told(found):
        names = ", ".join(str(state.devices[device]) for device in devices)
        state.order(Notice(what, details={"devices": names, **details}))
    return any(found)


def _told(found: Ended) -> list[tuple[str, tuple[int, ...], dict[str, str]]]:
    ended = [("pause_ended", found.unpaused, dict[str, str]())] if found.unpaused else []
    of_reservations = [("reservation_ended", one) for one in found.ended]
    of_reservations += [("reservation_began", one) for one in found.begun]
    return ended + [
        (what, one.devices, {"reservation": one.name, "tenant": one.tenant}) for what, one in of_reservations
    ]


def _use(state: State, event: DevicesUsed, now: float) -> None:
    """Note who else uses devices of a node, and tell people what has changed."""
    own = {str(device): number for number, device in enumerate(state.devices) if device.node == event.node}
    for name in (*event.users, *event.left):
        if name not in own:
            raise UsageError(f"there is no device {name!r} on that node", "see `gpuslice nodes`")
    before = {state.devices[number] for number in own.values() if number in state.closed.users}
    users = {own[name]: found for name, found in event.users.items() if found}
    state.closed.tell_time(event.unix_s, now)
    state.closed.use(own.values(), users, (own[name] for name in event.left if own[name] in users))
    for number in users:
        if state.devices[number] not in before:
            said = used_by(users[number], lambda unix_s: at(unix_s, event.unix_s))
            state.order(Notice("device_used", details={"devices": str(state.devices[number]), "by": said}))
    for device in sorted(before - {state.devices[number] for number in users}, key=str):
        state.order(Notice("device_free", details={"devices": str(device)}))


def _reserve(state: State, event: Reserved, now: float) -> None:
    devices = _devices(state, event.devices)
    if not event.unix_s < event.end_unix_s > event.begin_unix_s:
        raise UsageError("the reservation ends before it begins, or has ended", "give a later --end")
    reservation = Reservation(event.reservation, devices, event.begin_unix_s, event.end_unix_s, event.tenant)
    state.closed.reserve(reservation)
    state.closed.tell_time(event.unix_s, now)


def _devices(state: State, names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the devices with these names.

    Raises
    ------
    UsageError
        If one is no device, or none is named.
    """
    numbers = {str(state.devices[number]): number for number in state.present}
    for name in names:
        if name not in numbers:
            raise UsageError(f"there is no device {name!r} here", f"choose of {', '.join(numbers)}")
    if not names:
        raise UsageError("no device is named", f"choose of {', '.join(numbers)}")
    return tuple(dict.fromkeys(numbers[name] for name in names))
