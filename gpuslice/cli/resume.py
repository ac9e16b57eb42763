"""``gpuslice resume``: let a suspended job go on."""

from __future__ import annotations

from . import talk
from .options import JobArgument, Json, StateDir


def command(job: JobArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Let a job that was suspended by `gpuslice suspend` take part again."""
    return talk.resume(job, as_json=as_json, state_dir=state_dir)
