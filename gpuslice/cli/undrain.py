"""``gpuslice undrain``: let jobs begin on devices again."""

from __future__ import annotations

from . import device_commands
from .options import Json, OptionalDevices, StateDir


def command(devices: OptionalDevices = None, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Let jobs begin again on drained devices, by default on all."""
    return device_commands.undrain(devices or (), as_json=as_json, state_dir=state_dir)
