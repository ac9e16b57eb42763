"""``gpuslice demo``: three real trainings share one device, and their models are as without sharing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer

from gpuslice.errors import UsageError
from gpuslice.launch.command import check_outputs
from gpuslice.types import MAX_SECONDS, DeviceName


def command(
    device: Annotated[str, typer.Option(help="The device that the jobs share: cpu or cuda:0.")] = "cpu:0",
    quantum: Annotated[float, typer.Option(metavar="SECONDS", help="Length of a slice.")] = 1.0,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Train every job for N steps only.", show_default=False)
    ] = None,
    report_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="For the page, the trace and the jobs' output.")
    ] = Path("demo-report"),
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results here, too.", show_default=False)
    ] = None,
) -> None:
    """Show three real trainings that share one device by time slices.

    A small transformer, a convolutional network and a perceptron first run undisturbed, then share the
    device. The finished models must be equal bit for bit; the exit code is 1 if they are not.
    """
    from rich.console import Console

    from gpuslice.demo import main, report

    if not 0 < quantum <= MAX_SECONDS:
        raise UsageError(f"--quantum {quantum} is not a time", "give a positive number of seconds")
    check_outputs({"--json": json}, devices=True)
    signal.signal(signal.SIGTERM, _end)
    console = Console()
    found = main.run(DeviceName.parse(device), quantum, report_dir, steps, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    report.show(found, console)
    if not found.ok:
        failed = ", ".join(job.name for job in found.jobs if not job.equal or job.exit_code != 0)
        sys.stderr.write(f"gpuslice: not as undisturbed: {failed}\n")
        sys.stderr.write(f"gpuslice: their output is in {Path(found.page).parent / 'logs'}\n")
        raise typer.Exit(1)


def _end(number: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt``, so that nothing is left running."""
    sys.exit(128 + number)
