"""``gpuslice cancel``: end a job."""

from __future__ import annotations

from . import talk
from .options import JobArgument, StateDir


def command(job: JobArgument, state_dir: StateDir = None) -> int:
    """End a job; returns at once, `gpuslice wait` tells when it is gone."""
    return talk.cancel(job, state_dir=state_dir)
