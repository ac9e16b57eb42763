"""``gpuslice suspend``: take jobs off the devices."""

from __future__ import annotations

from . import client_commands
from .options import JobsArgument, Json, StateDir


def command(jobs: JobsArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Take jobs off their devices until `gpuslice resume`.

    Each job leaves at its next boundary.
    """
    return client_commands.suspend(jobs, as_json=as_json, state_dir=state_dir)
