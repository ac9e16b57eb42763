"""``gpuslice down``: end the scheduler."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .options import Json, StateDir


def command(
    drain: Annotated[bool, Option("--drain", help="Let the jobs finish first.")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """End the scheduler and its jobs.

    Returns when all their processes have ended.
    """
    return client_commands.down(drain=drain, as_json=as_json, state_dir=state_dir)
