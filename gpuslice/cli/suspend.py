"""``gpuslice suspend``: take a job off the devices."""

from __future__ import annotations

from . import talk
from .options import JobArgument, StateDir


def command(job: JobArgument, state_dir: StateDir = None) -> int:
    """Take a job off the devices at its next boundary, and keep it off until `gpuslice resume`."""
    return talk.suspend(job, state_dir=state_dir)
