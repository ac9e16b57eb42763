"""``gpuslice logs``: what a job printed."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .options import JobArgument, Json, StateDir


def command(
    job: JobArgument,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow until the job ends.")] = False,
    stderr: Annotated[bool, Option("--err", help="Print what went to stderr instead.")] = False,
    lines: Annotated[
        int | None, Option("-n", metavar="N", help="Print only the last N lines, and what follows.")
    ] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Print what a job has printed.

    With --json, print where it is kept.
    """
    if as_json:
        return client_commands.log_files(job, state_dir=state_dir)
    return client_commands.logs(job, follow=follow, stderr=stderr, lines=lines, state_dir=state_dir)
