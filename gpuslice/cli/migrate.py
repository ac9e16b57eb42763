"""``gpuslice migrate``: move a job to other devices."""

from __future__ import annotations

from typing import Annotated

from . import job_moves
from .declare import Option
from .options import JobArgument, Json, StateDir


def command(
    job: JobArgument,
    to: Annotated[str, Option(metavar="cuda:1", help="Where to; one device for each rank.")],
    wait: Annotated[bool, Option("--wait", help="Return when it trains there.")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Suspend a job and resume it on other devices.

    It says how many bytes go there, and about how long that takes. A job that waits goes there when its turn
    comes. A job that has these devices goes where this one comes from.
    """
    return job_moves.migrate(job, to=to, wait=wait, as_json=as_json, state_dir=state_dir)
