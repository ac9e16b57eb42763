"""``gpuslice wait``: until jobs have ended."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .options import JobsArgument, Json, StateDir


def command(
    jobs: JobsArgument,
    as_json: Json = False,
    timeout: Annotated[str | None, Option(metavar="60s", help="Wait no longer.")] = None,
    state_dir: StateDir = None,
) -> int:
    """Wait until all of these jobs have ended.

    Exits with the job's exit code (128 + n for signal n), 124 if it takes too long. Of several jobs the first
    exit code, in their order here, that is not 0.
    """
    return client_commands.wait(jobs, as_json=as_json, timeout=timeout, state_dir=state_dir)
