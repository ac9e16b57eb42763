"""What people are told of devices that are closed: paused, reserved, drained or used, and until when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuslice.sched_core.device_users import used_by
from gpuslice.sched_core.jobs.closed_devices import at, owner
from gpuslice.verbs import DeviceInfo


def remarks(devices: Sequence[DeviceInfo], now_unix_s: float) -> Iterator[str]:
    """Yield a sentence about each device that is closed to some jobs."""
    for device in devices:
        if said := closed(device, now_unix_s):
            yield f"{device.name} is {said}"


def closed(device: DeviceInfo, now_unix_s: float) -> str:
    """Return in words to whom ``device`` is closed, and until when; empty if it is closed to nobody."""
    parts = []
    if device.removed:
        return "removed, once its jobs have left it"
    if device.paused:
        until = device.paused_until_unix_s
        parts.append("paused" if until is None else f"paused until {at(until, now_unix_s)}")
    if device.reserved_for is not None and device.reserved_until_unix_s is not None:
        until_s = at(device.reserved_until_unix_s, now_unix_s)
        parts.append(f"reserved for {owner(device.reserved_for)} until {until_s}")
    if device.used_by:
        parts.append(used_by(device.used_by, lambda unix_s: at(unix_s, now_unix_s)))
    if device.drained:
        parts.append("drained")
    return ", ".join(parts)
