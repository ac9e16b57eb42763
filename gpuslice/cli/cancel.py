"""``gpuslice cancel``: end a job."""

from __future__ import annotations

from .scheduling import JobArgument, StateDir, connect


def command(job: JobArgument, state_dir: StateDir = None) -> None:
    """End a job; returns at once, `gpuslice wait` tells when it is gone."""
    with connect(state_dir) as client:
        client.cancel(job)
