"""``gpuslice reserve``: keep devices for one user's jobs."""

from __future__ import annotations

from typing import Annotated

from gpuslice.errors import UsageError

from . import device_commands
from .declare import Option
from .options import Json, OptionalDevices, StateDir


def command(
    devices: OptionalDevices = None,
    begin: Annotated[
        str | None, Option("--begin", metavar="09:00", help="A local time, or 2h from now; else now.")
    ] = None,
    end: Annotated[
        str | None, Option("--end", metavar="12:00", help="A local time, or 3h after the begin.")
    ] = None,
    user: Annotated[
        str | None, Option("--user", metavar="U", help="A tenant; else the jobs without one (-).")
    ] = None,
    listed: Annotated[bool, Option("--list", help="List all reservations.")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Keep devices for one user's jobs from one time to another.

    Jobs of others that are there park at the begin, and come back afterwards.
    """
    if listed:
        if devices or begin or end or user:
            raise UsageError("--list takes nothing else", "leave out devices and times")
        return device_commands.reservations(as_json=as_json, state_dir=state_dir)
    return device_commands.reserve(
        devices or (), begin=begin, end=end, user=user, as_json=as_json, state_dir=state_dir
    )
