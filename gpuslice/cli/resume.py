"""``gpuslice resume``: let suspended jobs go on."""

from __future__ import annotations

from . import client_commands
from .job_choice import Choice
from .options import All, Json, Mine, OptionalJobs, StateDir


def command(
    jobs: OptionalJobs = None,
    every: All = False,
    mine: Mine = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Let jobs that are suspended, or were submitted held, have devices."""
    return client_commands.resume(Choice(jobs or (), every, mine), as_json=as_json, state_dir=state_dir)
