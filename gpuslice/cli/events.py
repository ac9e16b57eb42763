"""``gpuslice events``: what happened, from the journal."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .options import Json, StateDir


def command(
    follow: Annotated[bool, Option("--follow", "-f", help="Follow until Ctrl-C.")] = False,
    as_json: Json = False,
    wide: Annotated[bool, Option("--wide", help="Cut no line.")] = False,
    state_dir: StateDir = None,
) -> int:
    """Print what happened to the jobs, the oldest event first.

    One event per line, cut to 100 columns on a terminal. Heartbeats are left out.
    """
    return client_commands.events(follow=follow, as_json=as_json, wide=wide, state_dir=state_dir)
