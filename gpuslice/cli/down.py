"""``gpuslice down``: end the scheduler."""

from __future__ import annotations

from typing import Annotated

from . import talk
from .declare import Option
from .options import StateDir


def command(
    drain: Annotated[bool, Option("--drain", help="Let the jobs finish first.")] = False,
    state_dir: StateDir = None,
) -> int:
    """Cancel all jobs, or let them finish, and end the scheduler; returns when all is gone."""
    return talk.down(drain=drain, state_dir=state_dir)
