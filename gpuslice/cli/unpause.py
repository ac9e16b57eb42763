"""``gpuslice unpause``: give paused devices back."""

from __future__ import annotations

from . import device_commands
from .options import DevicesArgument, Json, StateDir


def command(devices: DevicesArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Let jobs have paused devices again."""
    return device_commands.unpause(devices, as_json=as_json, state_dir=state_dir)
