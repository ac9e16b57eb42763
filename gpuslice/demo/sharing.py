"""The trainings under the scheduler: one device, round robin."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpuslice import launch
from gpuslice.clock import Clock
from gpuslice.config import Settings
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.live import Observer, Scheduler
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName

from .training import Training, steady

#: Far more than the demonstration takes; a job that hangs is reported instead of waited for.
_PATIENCE_S = 600.0
_TMPFS = Path("/dev/shm")


def run_sharing(
    trainings: Sequence[Training],
    device: DeviceName,
    quantum_s: float,
    directory: Path,
    clock: Clock,
    observer: Observer,
) -> None:
    """Run the trainings on ``device`` in turn until all have ended; leave no process and no snapshot.

    Parameters
    ----------
    directory
        Private and short-named, for the socket; the scripts' output goes to ``logs`` in it.

    Raises
    ------
    EnvironmentUnusableError
        If they do not end.
    """
    core = Core([device], RoundRobin(quantum_s=quantum_s))
    tmpfs = _TMPFS if os.access(_TMPFS, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gpuslice-demo-", dir=tmpfs) as ramdisk:
        settings = launch.check(Settings(device=str(device), ramdisk_dir=ramdisk))
        environ = launch.environment(settings, steady(os.environ))
        with Scheduler(core, directory, clock=clock, observer=observer) as scheduler:
            for training in trainings:
                spec = JobSpec(id=training.name, submit_s=clock.now())
                scheduler.submit(spec, training.program(torch_name(device), environ))
            if not scheduler.run(lambda: all_gone(core), timeout_s=_PATIENCE_S):
                states = ", ".join(f"{job.id} is {job.state.value}" for job in core.jobs.values())
                raise EnvironmentUnusableError(
                    f"the jobs did not end within {_PATIENCE_S:.0f} s: {states}", "see their output"
                )
        core.check()


def all_gone(core: Core) -> bool:
    """Whether every job has ended and left nothing behind."""
    return all(job.state.ended and job.processes_gone for job in core.jobs.values())


def torch_name(device: DeviceName) -> str:
    """What a script calls ``device``: the slots of the host are all ``cpu``."""
    return "cpu" if device.kind == "cpu" else str(device)
