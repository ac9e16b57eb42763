"""``gpuslice logs``: what a job printed."""

from __future__ import annotations

from typing import Annotated

import typer

from . import talk
from .options import JobArgument, StateDir


def command(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    stderr: Annotated[bool, typer.Option("--err", help="What went to stderr.")] = False,
    state_dir: StateDir = None,
) -> int:
    """Print a job's output."""
    return talk.logs(job, follow=follow, stderr=stderr, state_dir=state_dir)
