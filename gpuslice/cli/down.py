"""``gpuslice down``: end the scheduler."""

from __future__ import annotations

from typing import Annotated

import typer

from .scheduling import StateDir, connect


def command(
    drain: Annotated[bool, typer.Option("--drain", help="Let the jobs finish first.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Cancel all jobs, or let them finish, and end the scheduler; returns when all is gone."""
    with connect(state_dir) as client:
        client.down(drain=drain)
