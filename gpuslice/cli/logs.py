"""``gpuslice logs``: what a job printed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from .scheduling import JobArgument, StateDir, connect

_LOOK_AGAIN_S = 0.25


def command(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    stderr: Annotated[bool, typer.Option("--err", help="What went to stderr.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Print a job's output."""
    with connect(state_dir) as client:
        files = client.logs(job)
        with Path(files.err if stderr else files.out).open("rb") as log:
            while True:
                # Asked first: what is there after the end is all there will be.
                ended = not follow or client.wait(job, _LOOK_AGAIN_S) is not None
                shutil.copyfileobj(log, sys.stdout.buffer)
                sys.stdout.buffer.flush()
                if ended:
                    return
