"""``gpuslice pause``: take devices from all jobs."""

from __future__ import annotations

from typing import Annotated

from . import device_commands
from .declare import Option
from .options import DevicesArgument, Json, StateDir


def command(
    devices: DevicesArgument,
    for_time: Annotated[
        str | None, Option("--for", metavar="2h", help="Until then (or a local time); else until `unpause`.")
    ] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Take devices from all jobs for a while.

    What is there parks at its next boundary, and nobody gets the devices.
    """
    return device_commands.pause(devices, for_time=for_time, as_json=as_json, state_dir=state_dir)
