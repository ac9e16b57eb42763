"""``gpuslice cancel``: end a job."""

from __future__ import annotations

from . import talk
from .options import JobArgument, Json, StateDir


def command(job: JobArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """End a job; returns at once, `gpuslice wait` tells when it is gone."""
    return talk.cancel(job, as_json=as_json, state_dir=state_dir)
