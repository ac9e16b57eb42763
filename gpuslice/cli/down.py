"""``gpuslice down``: end the scheduler."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .options import Json, StateDir


def command(
    drain: Annotated[bool, Option("--drain", help="Let the jobs finish first.")] = False,
    keep: Annotated[
        bool, Option("--keep", help="Keep all jobs on disk; the next up goes on with them.")
    ] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """End the scheduler and its jobs, or keep these for the next scheduler.

    Returns when all their processes have ended. Ctrl-C calls --keep off.
    """
    return client_commands.down(drain=drain, keep=keep, as_json=as_json, state_dir=state_dir)
