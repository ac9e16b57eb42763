"""What users ask about devices, as events, and what they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from gpuslice import verbs
from gpuslice.errors import UsageError
from gpuslice.sched_core.jobs.closed_devices import Reservation
from gpuslice.sched_core.lifecycle.events import (
    DeviceRequest,
    Drained,
    Paused,
    Reserved,
    Undrained,
    Unpaused,
    Unreserved,
)
from gpuslice.sched_core.lifecycle.state import State

#: What people call the scheduler's own node.
_HERE = "here"


def event_of(state: State, request: verbs.DeviceVerb, unix_s: float) -> DeviceRequest:
    """Return the event that ``request`` asks for at the Unix time ``unix_s``.

    Raises
    ------
    UsageError
        If a name is of no device and of no node.
    """
    match request:
        case verbs.Pause():
            until_s = None if request.for_s is None else unix_s + request.for_s
            return Paused(_names(state, request.devices), unix_s, until_s)
        case verbs.Unpause():
            return Unpaused(_names(state, request.devices))
        case verbs.Drain():
            return Drained(_names(state, request.devices or _all(state)))
        case verbs.Undrain():
            drained = tuple(str(state.devices[device]) for device in sorted(state.closed.drained))
            if not drained:
                raise UsageError("no device is drained", "`gpuslice ps` shows what is")
            return Undrained(_names(state, request.devices or drained))
        case verbs.Unreserve():
            return Unreserved(request.reservation)
        case verbs.Reserve():
            begin_s, end_s = unix_s + request.begin_in_s, unix_s + request.end_in_s
            devices = _names(state, request.devices)
            return Reserved(state.closed.next_name, devices, unix_s, begin_s, end_s, request.user)


def answer_to(state: State, event: DeviceRequest, before: Sequence[Reservation]) -> verbs.DevicesChanged:
    """Return the answer to ``event``, which was carried out. ``before`` are the reservations before that."""
    until_unix_s = event.until_unix_s if isinstance(event, Paused) else None
    name = event.reservation if isinstance(event, Reserved | Unreserved) else ""
    found = [one for one in (*before, *state.closed.reservations) if one.name == name]
    about = _info(state, found[0]) if found else None
    devices = () if isinstance(event, Unreserved) else event.devices
    return verbs.DevicesChanged(
        devices=devices or (about.devices if about else ()), until_unix_s=until_unix_s, reservation=about
    )


def reservations(state: State) -> tuple[verbs.ReservationInfo, ...]:
    """Return all reservations, the first to begin first."""
    return tuple(_info(state, one) for one in state.closed.reservations)


def device_info(state: State, device: int) -> verbs.DeviceInfo:
    """Return the status of ``device``: the jobs on it, and to whom it is closed."""
    closed = state.closed
    end_s = closed.paused.get(device)
    present = next((one for one in closed.present if device in one.devices), None)
    return verbs.DeviceInfo(
        name=str(state.devices[device]),
        jobs=tuple(state.occupants[device]),
        paused=end_s is not None,
        paused_until_unix_s=None if end_s in (None, inf) else end_s,
        drained=device in closed.drained,
        reserved_for=None if present is None else present.tenant,
        reserved_until_unix_s=None if present is None else present.end_unix_s,
        used_by=closed.users.get(device, ()),
        removed=device in closed.removed,
    )


def _info(state: State, one: Reservation) -> verbs.ReservationInfo:
    return verbs.ReservationInfo(
        id=one.name,
        devices=tuple(str(state.devices[device]) for device in one.devices),
        begin_unix_s=one.begin_unix_s,
        end_unix_s=one.end_unix_s,
        user=one.tenant,
        active=one in state.closed.present,
    )


def _all(state: State) -> tuple[str, ...]:
    return tuple(str(state.devices[device]) for device in state.present)


def _names(state: State, words: Sequence[str]) -> tuple[str, ...]:
    """Return the names of devices that ``words`` stand for: devices, or nodes with all of their devices."""
    there = [state.devices[device] for device in state.present]
    found: dict[str, None] = {}
    for word in words:
        on_node = [str(one) for one in there if (one.node or _HERE) == word]
        if not on_node and word not in _all(state):
            nodes = dict.fromkeys(one.node or _HERE for one in there)
            raise UsageError(
                f"there is no device and no node {word!r} here",
                f"choose of {', '.join(_all(state))}, or of the nodes {', '.join(nodes)}",
            )
        found.update(dict.fromkeys(on_node or [word]))
    return tuple(found)
