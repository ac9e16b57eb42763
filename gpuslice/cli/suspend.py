"""``gpuslice suspend``: take jobs off the devices."""

from __future__ import annotations

from . import client_commands
from .options import JobsArgument, Json, StateDir


def command(jobs: JobsArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Take jobs off the devices at their next boundaries, and keep them off until `gpuslice resume`."""
    return client_commands.suspend(jobs, as_json=as_json, state_dir=state_dir)
