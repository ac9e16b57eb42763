"""``gpuslice ps``: the jobs and how they stand."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

import msgspec
import typer

from .scheduling import Json, StateDir, connect, print_rows, rows

_REFRESH_S = 1.0
_CLEAR = "\x1b[H\x1b[2J"


def command(
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until Ctrl-C.")] = False,
    state_dir: StateDir = None,
) -> None:
    """List all jobs: state, devices, steps, attained service, slices, exit code."""
    pause = threading.Event()
    with connect(state_dir) as client:
        while True:
            standing = client.status()
            if watch and sys.stdout.isatty():
                sys.stdout.write(_CLEAR)
            if as_json:
                print(msgspec.json.encode(msgspec.structs.asdict(standing)).decode(), flush=True)
            else:
                print_rows(rows(standing.jobs))
            if not watch:
                return
            pause.wait(_REFRESH_S)
