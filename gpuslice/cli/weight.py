"""``gpuslice weight``: change a job's share."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Argument
from .options import JobArgument, Json, StateDir


def command(
    job: JobArgument,
    weight: Annotated[str, Argument(metavar="W", help="A positive number; 1 is the usual weight.")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Give a job another weight: its share under rr and gandiva."""
    return client_commands.weight(job, weight, as_json=as_json, state_dir=state_dir)
