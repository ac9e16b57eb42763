"""``gpuslice cancel``: end jobs."""

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
    """End jobs.

    Returns at once; `gpuslice wait` returns when they are gone.
    """
    return client_commands.cancel(Choice(jobs or (), every, mine), as_json=as_json, state_dir=state_dir)
