"""``gpuslice cancel``: end jobs."""

from __future__ import annotations

from . import client_commands
from .options import JobsArgument, Json, StateDir


def command(jobs: JobsArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """End jobs.

    Returns at once; `gpuslice wait` returns when they are gone.
    """
    return client_commands.cancel(jobs, as_json=as_json, state_dir=state_dir)
