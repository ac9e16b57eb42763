"""``gpuslice wait``: until a job has ended."""

from __future__ import annotations

from typing import Annotated

from . import talk
from .declare import Option
from .options import JobArgument, Json, StateDir


def command(
    job: JobArgument,
    as_json: Json = False,
    timeout: Annotated[str | None, Option(metavar="60s", help="Wait no longer.")] = None,
    state_dir: StateDir = None,
) -> int:
    """Wait until a job has ended.

    Exits with the job's exit code (128 + n for signal n), 124 if it takes too long.
    """
    return talk.wait(job, as_json=as_json, timeout=timeout, state_dir=state_dir)
