"""``gpuslice ps``: the jobs and how they stand."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .options import Json, StateDir


def command(
    as_json: Json = False,
    watch: Annotated[bool, Option("--watch", help="Again every second, until Ctrl-C.")] = False,
    state_dir: StateDir = None,
) -> int:
    """List all jobs: state, devices, steps, attained service, slices, exit code."""
    return client_commands.ps(as_json=as_json, watch=watch, state_dir=state_dir)
