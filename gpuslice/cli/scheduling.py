"""What the commands that talk to the scheduler have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpuslice.client import Client
from gpuslice.verbs import JobInfo

StateDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The scheduler's directory [$GPUSLICE_STATE_DIR, or XDG's]."),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as `submit` printed it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; the keys are documented and stay.")]

_COLUMNS = ("JOB", "STATE", "DEVICES", "STEPS", "STEPS/S", "SERVICE", "SLICES", "EXIT")


def connect(state_dir: Path | None) -> Client:
    """A client of the scheduler that the user means."""
    return Client(state_dir)


def exit_status(job: JobInfo) -> int:
    """What a shell would say of a job that ended: its exit code, 128 + n for signal n."""
    if job.state == "succeeded":
        return 0
    code = job.exit_code or 1
    return code if code > 0 else 128 - code


def rows(jobs: Sequence[JobInfo]) -> list[tuple[str, ...]]:
    """The jobs as a table, its header first."""
    return [_COLUMNS, *(_row(job) for job in jobs)]


def print_rows(table: Sequence[tuple[str, ...]]) -> None:
    """Aligned columns on a terminal, tabs elsewhere."""
    if not sys.stdout.isatty():
        print("\n".join("\t".join(row) for row in table))
        return
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(job: JobInfo) -> tuple[str, ...]:
    return (
        job.id,
        f"{job.state}, held" if job.held else job.state,
        ",".join(job.devices) or "-",
        str(job.steps),
        "-" if job.steps_per_s is None else f"{job.steps_per_s:.1f}",
        f"{job.service_s:.1f} s",
        str(job.slices),
        "-" if job.exit_code is None else str(job.exit_code),
    )
