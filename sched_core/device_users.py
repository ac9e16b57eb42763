"""Processes that use a device and belong to no job of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuslice.config import format_size
from gpuslice.verbs import DeviceUser

#: Most processes that are told of one device.
MOST_USERS = 64
#: Sizes that differ by less are told as the same.
_SAME_BYTES = 256 << 20


def alike(one: DeviceUser, other: DeviceUser) -> bool:
    """Return True if both are the same process, with about the same memory."""
    near = abs((one.nbytes or 0) - (other.nbytes or 0)) < _SAME_BYTES
    return near and (one.pid, one.since_unix_s) == (other.pid, other.since_unix_s)


def used_by(users: Sequence[DeviceUser], at: Callable[[float], str]) -> str:
    """Return in words who uses a device: ``used by u1003, pid 4711 python, 21.00 GiB, since 09:12``.

    ``at`` returns a Unix time in words.
    """
    first = max(users, key=lambda one: (one.nbytes or 0, -one.pid))
    size = "" if first.nbytes is None else f", {format_size(first.nbytes)}"
    others = f", and {len(users) - 1} more" if len(users) > 1 else ""
    since = at(first.since_unix_s)
    return f"used by {first.user}, pid {first.pid} {first.command}{size}, since {since}{others}"
