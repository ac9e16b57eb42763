"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StateDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The scheduler's directory [$GPUSLICE_STATE_DIR, or XDG's]."),
]


def _jobs_like(incomplete: str) -> list[str]:
    """Ids that begin so, for shell completion; none if nobody can be asked."""
    from gpuslice.errors import GpusliceError

    from .talk import connect

    try:
        with connect(None) as client:
            return [job.id for job in client.jobs() if job.id.startswith(incomplete)]
    except GpusliceError:
        return []


JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job's id, as `submit` printed it.", autocompletion=_jobs_like),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; the keys are documented and stay.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="(SCRIPT.py | -m MODULE | -- COMMAND) [ARGS]...", show_default=False),
]
Route = Annotated[
    str | None, typer.Option(metavar="ROUTE", help="How the device is emptied: auto, tensor, vmm or driver.")
]
