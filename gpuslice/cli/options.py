"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .declare import Argument, Option

StateDir = Annotated[
    Path | None, Option(metavar="DIR", help="The scheduler's directory [$GPUSLICE_STATE_DIR, or XDG's].")
]


def _jobs_like(incomplete: str) -> list[str]:
    """Return ids of jobs that begin with ``incomplete``, for shells. Return none without a scheduler."""
    from gpuslice.errors import GpusliceError

    from .client_commands import connect

    try:
        with connect(None) as client:
            return [job.id for job in client.jobs() if job.id.startswith(incomplete)]
    except GpusliceError:
        return []


JobArgument = Annotated[
    str, Argument(metavar="JOB", help="A job's id, as `submit` printed it.", complete=_jobs_like)
]
JobsArgument = Annotated[
    list[str], Argument(metavar="JOB...", help="Ids of jobs, as `submit` printed them.", complete=_jobs_like)
]
OptionalJobs = Annotated[
    list[str] | None,
    Argument(metavar="[JOB|'GLOB']...", help="Ids of jobs, or quoted globs.", complete=_jobs_like),
]
DevicesArgument = Annotated[
    list[str], Argument(metavar="DEVICE...", help="Devices, as cuda:1, or nodes with all of theirs.")
]
OptionalDevices = Annotated[
    list[str] | None,
    Argument(metavar="[DEVICE|NODE]...", help="Devices, as cuda:1, or nodes with all of theirs."),
]
All = Annotated[bool, Option("--all", help="All jobs for which it is possible.")]
Mine = Annotated[
    bool, Option("--mine", help="Only jobs of yours: those of the tenant with your name, or of none.")
]
Json = Annotated[bool, Option("--json", help="Print JSON; the keys are documented and stay.")]
CheckpointEvery = Annotated[
    int | None,
    Option(metavar="N", help="Save attached state at every Nth boundary while training goes on."),
]
#: Everything from the script on is the script's; unknown options before it are named by `launch`.
Words = Annotated[
    list[str] | None, Argument(metavar="(SCRIPT.py | -m MODULE | -- COMMAND) [ARGS]...", rest=True)
]
Route = Annotated[
    str | None, Option(metavar="ROUTE", help="How the device is emptied: auto, tensor, vmm or driver.")
]
