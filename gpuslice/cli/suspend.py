"""``gpuslice suspend``: take a job off the devices."""

from __future__ import annotations

from . import talk
from .options import JobArgument, Json, StateDir


def command(job: JobArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Take a job off the devices at its next boundary, and keep it off until `gpuslice resume`."""
    return talk.suspend(job, as_json=as_json, state_dir=state_dir)
