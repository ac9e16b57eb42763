"""The whole demonstration: both runs, the comparison and the report."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console

from gpuslice.clock import Clock, MonotonicClock
from gpuslice.config import Settings
from gpuslice.errors import UsageError
from gpuslice.launch import command
from gpuslice.sched_core.lifecycle.events import Command, Event
from gpuslice.sched_core.nodes.endpoint import check_path
from gpuslice.sched_core.nodes.local_node import rank_endpoint
from gpuslice.types import DeviceName

from . import report
from .recorder import Recorder
from .screen import open_screen
from .sharing import run_sharing, torch_name
from .training import TRAININGS, Training, digest, last_loss, steady
from .undisturbed import run_undisturbed

#: Directories in the report's ``logs`` with the scripts' output of each run.
_UNDISTURBED, _SHARED = "undisturbed", "shared"


def run(
    device: DeviceName, quantum_s: float, report_directory: Path, steps: int | None, console: Console
) -> report.Result:
    """Run the trainings undisturbed and shared, compare them, write page and trace, and return the result.

    Parameters
    ----------
    device
        The device that they share: ``cpu``, which is the whole host, or a GPU.
    quantum_s
        Length of a slice.
    report_directory
        Directory for the page, the trace and the scripts' output. It is made if it does not exist.
    steps
        Number of steps of every training; None for each training's own number.

    Raises
    ------
    EnvironmentUnusableError
        If the device or the directory cannot be used.
    UsageError
        If an option is impossible.
    """
    if steps is not None and steps < 1:
        raise UsageError(f"{steps} is not a number of steps", "give 1 or more")
    if device.kind == "cpu" and device.index:
        raise UsageError(f"{device} is not the host's only slot", "give cpu, or a GPU such as cuda:0")
    device = DeviceName(device.kind, device.index or 0)
    command.check(Settings(device=str(device)))
    with _scheduler_directory() as name:
        check_path(rank_endpoint(Path(name)))  # fail now, not after the undisturbed run
    trainings = [replace(one, steps=steps or one.steps) for one in TRAININGS]
    clock = MonotonicClock()
    begun_s = clock.now()
    report_directory = report_directory.resolve()
    logs = _make_logs(report_directory, trainings)
    console.print(f"Each training on its own, without gpuslice ({len(trainings)} processes side by side)")

    def done(name: str, code: int) -> None:
        elapsed_s = clock.now() - begun_s
        console.print(f"{elapsed_s:6.2f} s  {name} ended with exit code {code}", highlight=False)

    environ = steady(os.environ)
    digests = run_undisturbed(trainings, torch_name(device), environ, logs / _UNDISTURBED, clock, done)
    console.print(
        f"The same scripts sharing {device}, {quantum_s:g} s or a multiple at a time", highlight=False
    )
    recorder = _share(trainings, device, quantum_s, logs / _SHARED, clock, console)
    jobs = []
    for training in trainings:
        output = logs / _SHARED / f"{training.name}.out"
        both = (digest(output), digests[training.name])
        jobs.append(report.job_result(training, recorder.jobs[training.name], both, last_loss(output)))
    about = {"device": str(device), "quantum_s": quantum_s, "wall_s": clock.now() - begun_s}
    found = report.result(recorder, jobs, about, report_directory)
    report.write(found, recorder)
    return found


def _share(
    trainings: Sequence[Training],
    device: DeviceName,
    quantum_s: float,
    logs: Path,
    clock: Clock,
    console: Console,
) -> Recorder:
    """Run the trainings shared, show the run live, and return its recorder. Output is kept in ``logs``."""
    begun_s = clock.now()
    recorder = Recorder(begun_s)
    screen = open_screen(console, recorder, trainings, lambda: clock.now() - begun_s)

    def observe(event: Event, now: float, commands: Sequence[Command]) -> None:
        recorder.observe(event, now, commands)
        screen.observe(event, now, commands)

    with _scheduler_directory() as name:
        directory = Path(name)
        try:
            with screen:
                run_sharing(trainings, device, quantum_s, directory, clock, observe, recorder.look)
        finally:
            if (directory / "logs").is_dir():
                shutil.copytree(directory / "logs", logs, dirs_exist_ok=True)
    return recorder


def _scheduler_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary directory for a scheduler: private and with a short path for the socket."""
    return tempfile.TemporaryDirectory(prefix="gpuslice-")


def _make_logs(report_directory: Path, trainings: Sequence[Training]) -> Path:
    """Make the directory for the scripts' output, empty it of earlier output, and return its path."""
    logs = report_directory / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for run, training in product((_UNDISTURBED, _SHARED), trainings):
            for former in (logs / run).glob(f"{training.name}.*"):
                former.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write to {report_directory}: {error.strerror}", "choose another --report-dir"
        ) from error
    return logs
