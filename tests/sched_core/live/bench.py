"""A scheduler for tests, with real sockets and real processes (which train nothing, see rank.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import GRACE_S, JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Command, Event
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName

from ...patience import PATIENCE_S

RANK = Path(__file__).parents[1] / "rank.py"


class Bench:
    """A scheduler, its core, and everything that happened."""

    def __init__(self, directory: Path, device_count: int) -> None:
        devices = [DeviceName("null", index) for index in range(device_count)]
        self.core = Core(devices, RoundRobin(quantum_s=0.05))
        self.story: list[tuple[Event, Sequence[Command]]] = []
        self.scheduler = Scheduler(self.core, directory, observer=self.observe)

    def observe(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        self.core.check()
        self.story.append((event, commands))

    def submit(
        self,
        job: str,
        boundaries: int | Path = 40,
        *,
        code: int = 0,
        ranks: int = 1,
        options: Sequence[str] = (),
        grace_s: float = GRACE_S,
    ) -> None:
        argv = (sys.executable, str(RANK), str(boundaries), str(code), *options)
        program = Program(argv, "/", {**os.environ, "WORLD": str(ranks)})
        self.scheduler.submit(JobSpec(id=job, submit_s=0.0, devices=ranks, grace_s=grace_s), program)

    def run(self, until: Callable[[], bool]) -> None:
        assert self.scheduler.run(until, timeout_s=PATIENCE_S), {
            job.id: (job.state, list(job.history)) for job in self.core.jobs.values()
        }

    def finish(self) -> dict[str, JobState]:
        self.run(lambda: all(job.state.ended and job.processes_gone for job in self.core.jobs.values()))
        return {job.id: job.state for job in self.core.jobs.values()}

    def wait_for(self, job: str, state: JobState) -> None:
        self.run(lambda: self.core.jobs[job].state is state)

    def output(self, job: str, stream: str = "out") -> str:
        return self.scheduler.local.processes.log(job, stream).read_text()


def children(former: list[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child not in former]


def alive(process: psutil.Process | int) -> bool:
    """Whether it, or that pid, runs; one that nobody has waited for yet does not."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
