"""``gpuslice resume``: let suspended jobs go on."""

from __future__ import annotations

from . import client_commands
from .options import JobsArgument, Json, StateDir


def command(jobs: JobsArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Let jobs that `gpuslice suspend` has stopped have devices again."""
    return client_commands.resume(jobs, as_json=as_json, state_dir=state_dir)
