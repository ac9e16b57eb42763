"""``gpuslice resume``: let a suspended job go on."""

from __future__ import annotations

from .scheduling import JobArgument, StateDir, connect


def command(job: JobArgument, state_dir: StateDir = None) -> None:
    """Let a job that was suspended by `gpuslice suspend` take part again."""
    with connect(state_dir) as client:
        client.resume(job)
