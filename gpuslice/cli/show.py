"""``gpuslice show``: everything about one job."""

from __future__ import annotations

from . import client_commands
from .options import JobArgument, Json, StateDir


def command(job: JobArgument, as_json: Json = False, state_dir: StateDir = None) -> int:
    """Show everything about one job on a page.

    What was asked for, why it waits, when it will end, its attempts, where its time has gone, what its
    switches cost, its last lines. The keys of --json are those of a job in `gpuslice ps --json`.
    """
    return client_commands.show(job, as_json=as_json, state_dir=state_dir)
