"""``gpuslice drain``: let no job begin on devices."""

from __future__ import annotations

from . import device_commands
from .options import Json, OptionalDevices, StateDir


def command(devices: OptionalDevices = None, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Let no job begin on devices, by default on all.

    Jobs that have begun there go on there to their end.
    """
    return device_commands.drain(devices or (), as_json=as_json, state_dir=state_dir)
