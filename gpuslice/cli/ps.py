"""``gpuslice ps``: the jobs and how they stand."""

from __future__ import annotations

from typing import Annotated

from . import client_commands
from .declare import Option
from .options import Json, OptionalJobs, StateDir


def command(
    jobs: OptionalJobs = None,
    user: Annotated[
        str | None, Option(metavar="U", help="Only jobs of this tenant (-: of those without one).")
    ] = None,
    state: Annotated[
        str | None, Option(metavar="S", help="Only jobs in this state, or in one of S,S.")
    ] = None,
    as_json: Json = False,
    watch: Annotated[bool, Option("--watch", help="Print again every second, until Ctrl-C.")] = False,
    wide: Annotated[bool, Option("--wide", help="Print all columns, and cut nothing.")] = False,
    expand: Annotated[bool, Option("--expand", help="Print each job of an array.")] = False,
    state_dir: StateDir = None,
) -> int:
    """List jobs: state, device, progress, and why they wait.

    Lines are at most 100 columns wide, and an array is one line. `gpuslice show JOB` says everything about
    one job.
    """
    return client_commands.ps(
        jobs or (),
        user=user,
        state=state,
        as_json=as_json,
        watch=watch,
        wide=wide,
        expand=expand,
        state_dir=state_dir,
    )
