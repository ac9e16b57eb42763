"""The shared run under its own scheduler: ``up``, ``submit``, ``wait`` and ``down``, as users call them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuslice.client.client import Client
from gpuslice.clock import Clock
from gpuslice.config import variable
from gpuslice.daemon import background_start
from gpuslice.daemon.replay import JournalReplay
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.journal.journal import FILE
from gpuslice.sched_core.nodes.processes import uninterrupted
from gpuslice.types import DeviceName
from gpuslice.verbs import JobInfo

from .recorder import Observer
from .training import SCRIPTS, Training, steady

#: Far more time than the demonstration takes. Then a job that hangs is reported.
_PATIENCE_S = 600.0
_LOOK_AGAIN_S = 0.125
_TMPFS = Path("/dev/shm")


def run_sharing(
    trainings: Sequence[Training],
    device: DeviceName,
    quantum_s: float,
    directory: Path,
    clock: Clock,
    observe: Observer,
    look: Callable[[Sequence[JobInfo]], None],
) -> None:
    """Run the trainings in turns on ``device`` until all have ended. Leave no process and no snapshot.

    Parameters
    ----------
    directory
        The scheduler's directory: private, with a short path. The scripts' output is in its ``logs``.
    observe
        Called with every event, its time, and the scheduler's commands that followed.
    look
        Called several times a second with the state of the jobs.

    Raises
    ------
    EnvironmentUnusableError
        If the trainings do not end in time.
    """
    tmpfs = _TMPFS if os.access(_TMPFS, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="gpuslice-demo-", dir=tmpfs) as ramdisk,
        _scheduler(device, quantum_s, directory) as client,
        JournalReplay(directory / FILE) as replay,
    ):
        environ = {**steady(os.environ), variable("ramdisk_dir"): ramdisk}
        place = str(SCRIPTS)
        unfinished = [
            client.submit(one.words(torch_name(device)), name=one.name, environ=environ, directory=place)
            for one in trainings
        ]
        ends_s = clock.now() + _PATIENCE_S
        while unfinished:
            ended = client.wait(unfinished[0], _LOOK_AGAIN_S)
            for event, at_s, commands in replay.advance():
                observe(event, at_s, commands)
            jobs = client.jobs()
            look(jobs)
            if ended is not None:
                del unfinished[0]
            elif clock.now() >= ends_s:
                states = ", ".join(f"{job.id} is {job.state}" for job in jobs)
                raise EnvironmentUnusableError(
                    f"the jobs did not end within {_PATIENCE_S:.0f} s: {states}", "see their output"
                )


@contextmanager
def _scheduler(device: DeviceName, quantum_s: float, directory: Path) -> Iterator[Client]:
    """Start a scheduler in the background, as ``gpuslice up`` does. At the end, end it and its jobs."""
    beside = ("--foreign", "ignore")  # the demonstration goes on beside whatever else is there
    words = ("--devices", torch_name(device), "--policy", "rr", "--quantum", f"{quantum_s:f}s", *beside)
    try:
        with uninterrupted():
            background_start.start(directory, [*words, "--state-dir", str(directory)])
        with Client(directory) as client:
            yield client
    finally:
        with uninterrupted(), Client(directory) as client, suppress(EnvironmentUnusableError):
            client.down()  # the error is that it did not start


def torch_name(device: DeviceName) -> str:
    """Return torch's name of ``device``: ``cpu`` for every slot of the host."""
    return "cpu" if device.kind == "cpu" else str(device)
