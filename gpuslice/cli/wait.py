"""``gpuslice wait``: until jobs have ended."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .options import JobsArgument, Json, StateDir


def command(
    jobs: JobsArgument,
    as_json: Json = False,
    timeout: Annotated[str | None, Option(metavar="60s", help="Wait no longer than this.")] = None,
    state_dir: StateDir = None,
) -> int:
    """Wait until jobs have ended.

    Exits with the job's exit code (128 + n for signal n), or 124 after --timeout. Of several jobs, exits with
    the first exit code that is not 0, in their order here.
    """
    return client_commands.wait(jobs, as_json=as_json, timeout=timeout, state_dir=state_dir)
