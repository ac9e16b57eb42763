"""``gpuslice suspend``: take jobs off the devices."""

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
    """Take jobs off their devices until `gpuslice resume`.

    Each job leaves at its next boundary.
    """
    return client_commands.suspend(Choice(jobs or (), every, mine), as_json=as_json, state_dir=state_dir)
