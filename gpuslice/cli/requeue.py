"""``gpuslice requeue``: another attempt of jobs that have ended."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .job_choice import Choice
from .options import All, Json, Mine, OptionalJobs, StateDir


def command(
    jobs: OptionalJobs = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Start from the beginning: remove the job's snapshots.")
    ] = False,
    every: All = False,
    mine: Mine = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Start jobs that have ended again.

    Each keeps its id. A job that failed goes on from its newest snapshot, if its script can be restarted.
    """
    choice = Choice(jobs or (), every, mine)
    return client_commands.requeue(choice, fresh=fresh, as_json=as_json, state_dir=state_dir)
