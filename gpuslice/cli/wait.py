"""``gpuslice wait``: until a job has ended."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gpuslice.config import parse_duration

from .scheduling import JobArgument, StateDir, connect, exit_status

TIMED_OUT = 124


def command(
    job: JobArgument,
    timeout: Annotated[str | None, typer.Option(metavar="60s", help="Wait no longer.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Wait until a job has ended.

    Exits with the job's exit code (128 + n for signal n), 124 if it takes too long.
    """
    timeout_s = None if timeout is None else parse_duration(timeout)
    with connect(state_dir) as client:
        ended = client.wait(job, timeout_s)
    if ended is None:
        raise typer.Exit(TIMED_OUT)
    if ended.reason:
        sys.stderr.write(f"gpuslice: {job} {ended.state}: {ended.reason}\n")
    raise typer.Exit(exit_status(ended))
