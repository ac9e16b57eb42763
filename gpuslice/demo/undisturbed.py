"""The undisturbed run: each training without gpuslice, for comparison with the shared run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpuslice.clock import Clock
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.lifecycle.events import Exited
from gpuslice.sched_core.nodes.processes import Processes

from .training import SCRIPTS, Training, digest


def run_undisturbed(
    trainings: Sequence[Training],
    device: str,
    environ: Mapping[str, str],
    logs: Path,
    clock: Clock,
    done: Callable[[str, int], None],
) -> dict[str, str]:
    """Run the trainings side by side. Return their digests by name; a failed one has an empty digest.

    Parameters
    ----------
    done
        Called with the name and exit code of each training that ends.
    """
    logs.mkdir(parents=True, exist_ok=True)
    processes = Processes(logs)
    try:
        for training in trainings:
            argv = (sys.executable, *training.words(device))
            processes.launch(training.name, Program(argv, str(SCRIPTS), dict(environ)), {})
        while processes.descriptors:
            for event in processes.wait():
                if isinstance(event, Exited):
                    done(event.job, event.code)
    finally:
        processes.end_all(clock)
    return {training.name: digest(processes.log(training.name, "out")) for training in trainings}
