"""``gpuslice resume``: let suspended jobs go on."""

from __future__ import annotations

from . import talk
from .options import JobsArgument, Json, StateDir


def command(jobs: JobsArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Let jobs that were suspended by `gpuslice suspend` take part again."""
    return talk.resume(jobs, as_json=as_json, state_dir=state_dir)
