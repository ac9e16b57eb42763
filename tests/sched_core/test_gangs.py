"""Real gangs: two DDP trainings under torchrun take turns on two devices, moved all or nothing."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gpuslice.config import Settings
from gpuslice.launch import command
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Command, Event, Held, Released, Reported
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.types import DeviceName
from gpuslice.wire import Hello, Overshot

from ..gpuslice.conftest import servers, train_undisturbed
from ..gpuslice.warm.process import Servers
from ..patience import PATIENCE_S

__all__ = ["servers"]

SCRIPT = Path(__file__).with_name("ddp.py")
EPOCHS = "8"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def ramdisk() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpuslice-test-", dir="/dev/shm") as directory:
        yield directory


def digest(text: str) -> str:
    found = re.search(r"^digest (\w{64})$", text, re.MULTILINE)
    assert found, text
    return found[1]


@pytest.mark.slow
@pytest.mark.gangs
def test_gangs_that_share_devices_end_as_undisturbed_ones(
    tmp_path: Path, ramdisk: str, servers: Servers
) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = (*TORCHRUN, str(SCRIPT), EPOCHS)
    alone = train_undisturbed(tmp_path, servers, 2, str(SCRIPT), EPOCHS)
    core = Core([DeviceName("cpu", 0), DeviceName("cpu", 1)], RoundRobin(quantum_s=0.5))

    begin, enough, here = tmp_path / "begin", tmp_path / "enough", set[tuple[str, int]]()

    def observe(event: Event, now: float, commands: Sequence[Command]) -> None:
        core.check()
        if isinstance(event, Reported) and isinstance(event.message, Hello):
            here.add((event.job, event.rank))
            if len(here) == 4:  # or one gang might be done before the other is there
                begin.touch()
        if len(core.jobs) == 2 and all(job.epoch > 1 for job in core.jobs.values()):
            enough.touch()

    program = Program(
        (*argv, str(begin), str(enough)),
        "/",
        command.environment(Settings(device="cpu:0", ramdisk_dir=ramdisk), environ),
    )
    with Scheduler(core, tmp_path / "s", observer=observe) as scheduler:
        for job in "gh":
            scheduler.submit(JobSpec(id=job, submit_s=0.0, devices=2), program)
        assert scheduler.run(
            lambda: all(job.state.ended and job.processes_gone for job in core.jobs.values()),
            timeout_s=PATIENCE_S,
        )
        outputs = [scheduler.local.processes.log(job, "out").read_text() for job in "gh"]
    assert {job.state for job in core.jobs.values()} == {JobState.SUCCEEDED}
    assert all(job.epoch > 1 for job in core.jobs.values()), "nothing was put to the test"
    assert [digest(output) for output in outputs] == [digest(alone)] * 2


@pytest.mark.slow
@pytest.mark.gangs
def test_a_gang_with_a_collective_pending_at_every_other_boundary_stops_between_them(
    tmp_path: Path, ramdisk: str
) -> None:
    environ, enough = {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "enough"
    argv = (*TORCHRUN, str(SCRIPT.with_name("pending_collectives.py")), str(enough))
    core = Core([DeviceName("cpu", 0), DeviceName("cpu", 1)], RoundRobin(quantum_s=60.0))
    passed_by: list[int] = []

    def observe(event: Event, now: float, commands: Sequence[Command]) -> None:
        core.check()
        if isinstance(event, Reported) and isinstance(event.message, Overshot):
            passed_by.append(event.message.boundary)

    settings = Settings(device="cpu:0", ramdisk_dir=ramdisk)
    program = Program(argv, "/", command.environment(settings, environ))
    with Scheduler(core, tmp_path / "s", observer=observe) as scheduler:

        def run(until: Callable[[], bool]) -> None:
            assert scheduler.run(until, timeout_s=PATIENCE_S), list(job.history)

        scheduler.submit(JobSpec(id="g", submit_s=0.0, devices=2), program)
        job = core.jobs["g"]
        for _ in range(5):
            before = min(rank.boundary for rank in job.ranks)
            run(lambda: min(rank.boundary for rank in job.ranks) > before)  # noqa: B023
            scheduler.apply_request(Held("g"))
            run(lambda: job.state is JobState.SUSPENDED)
            assert {rank.boundary % 2 for rank in job.ranks} == {0}
            scheduler.apply_request(Released("g"))
            run(lambda: job.state is JobState.RUNNING)
        enough.touch()
        run(lambda: job.state.ended and job.processes_gone)
    assert job.state is JobState.SUCCEEDED
    assert passed_by
