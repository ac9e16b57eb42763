"""``gpuslice suspend``: take a job off the devices."""

from __future__ import annotations

from .scheduling import JobArgument, StateDir, connect


def command(job: JobArgument, state_dir: StateDir = None) -> None:
    """Take a job off the devices at its next boundary, and keep it off until `gpuslice resume`."""
    with connect(state_dir) as client:
        client.suspend(job)
