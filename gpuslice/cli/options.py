"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StateDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The scheduler's directory [$GPUSLICE_STATE_DIR, or XDG's]."),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as `submit` printed it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; the keys are documented and stay.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="(SCRIPT.py | -m MODULE | -- COMMAND) [ARGS]...", show_default=False),
]
Route = Annotated[
    str | None, typer.Option(metavar="ROUTE", help="How the device is emptied: auto, tensor, vmm or driver.")
]
