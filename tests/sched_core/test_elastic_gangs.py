"""A real elastic training under a real scheduler: it grows when devices are idle, and shrinks for others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from gpuslice.config import Settings
from gpuslice.launch import command
from gpuslice.launch.rank_start import as_ranks
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Command, Event, Notice
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.policies.gandiva.policy import Gandiva
from gpuslice.sched_core.policies.optimus import Optimus
from gpuslice.sched_core.policy import View
from gpuslice.types import DeviceName
from tests.gpuslice.elastic import training
from tests.gpuslice.elastic.checks import (
    check_close,
    check_epochs,
    check_equal,
    check_state,
    last_attempts,
    logs,
)

from ..patience import PATIENCE_S

SCRIPT = str(Path(training.__file__))
SHARDED = str(Path(SCRIPT).with_name("sharded_training.py"))
RANK = str(Path(__file__).with_name("rank.py"))
#: The scripts import modules of the tests.
PATHS = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])])


@pytest.fixture
def ramdisk() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpuslice-test-", dir="/dev/shm") as directory:
        yield directory


@pytest.mark.slow
@pytest.mark.gangs
def test_parameters_divided_among_ranks_are_divided_anew(tmp_path: Path, ramdisk: str) -> None:
    """1 -> 3 -> 1 ranks, of which two are parked away with parts of the state that the third goes on with."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    path = tmp_path / "log"
    argv = command.command_line(as_ranks([SHARDED, str(path), "0", "", "until-1-3-1"], 3))
    settings = Settings(device="cpu:0", ramdisk_dir=ramdisk, cpu_slots=4)
    core = Core([DeviceName("cpu", slot) for slot in range(3)], Gandiva(quantum_s=0.5, look_s=0.5))
    elastic = JobSpec(id="e", submit_s=0.0, least_devices=1, most_devices=3)
    with Scheduler(core, tmp_path / "s", observer=lambda event, now, commands: core.check()) as scheduler:
        scheduler.submit(elastic, Program(tuple(argv), "/", command.environment(settings, environ)))
        job, err = core.jobs["e"], scheduler.local.processes.log("e", "err")

        def grown() -> bool:
            whole = job.width == 3 and job.state is JobState.RUNNING
            return job.state.ended or (whole and min(rank.boundary for rank in job.ranks) > 1)

        assert scheduler.run(grown, timeout_s=PATIENCE_S), err.read_text()
        other = Program((sys.executable, RANK, "200", "0"), "/", {**environ, "WORLD": "2"})
        scheduler.submit(JobSpec(id="other", submit_s=0.0, devices=2), other)
        assert scheduler.run(lambda: job.state.ended, timeout_s=PATIENCE_S), err.read_text()
        assert job.state is JobState.SUCCEEDED, err.read_text()
    resized = logs(path, 3)
    assert {line["width"] for line in resized[0] if "width" in line} >= {1, 3}
    check_epochs(resized, max(line["epoch"] for line in resized[0] if "epoch" in line) + 1)
    check_equal(resized)
    check_state(resized)


class Watched(Optimus):
    """Counts its allocations."""

    allocations = 0

    def _anew(self, view: View) -> dict[str, int]:
        self.allocations += 1
        return super()._anew(view)


@pytest.mark.slow
@pytest.mark.gangs
def test_optimus_leaves_a_device_idle_on_which_a_job_was_measured_to_be_slower(
    tmp_path: Path, ramdisk: str
) -> None:
    """It begins on both devices, has one while another job is there, and keeps to that."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    words = [SCRIPT, str(tmp_path / "log"), "0", "", "until-2-1-2", "crowded"]
    argv = command.command_line(as_ranks(words, 2))
    settings = Settings(device="cpu:0", ramdisk_dir=ramdisk, cpu_slots=4)
    policy = Watched(interval_s=0.5)
    core = Core([DeviceName("cpu", slot) for slot in range(2)], policy)
    with Scheduler(core, tmp_path / "s", observer=lambda event, now, commands: core.check()) as scheduler:
        elastic = JobSpec(id="e", submit_s=0.0, least_devices=1, most_devices=2)
        scheduler.submit(elastic, Program(tuple(argv), "/", command.environment(settings, environ)))
        job = core.jobs["e"]

        def wait(until: Callable[[], bool]) -> None:
            assert scheduler.run(lambda: until() or job.state.ended, timeout_s=PATIENCE_S)
            assert not job.state.ended, scheduler.processes.log("e", "err").read_text()

        def measured() -> set[int]:
            return set(core.allocation.throughput.speeds(job))

        wait(lambda: measured() == {2})
        other = Program((sys.executable, RANK, "100000", "0"), "/", {**environ, "WORLD": "1"})
        scheduler.submit(JobSpec(id="other", submit_s=0.0), other)
        wait(lambda: measured() == {1, 2})
        scheduler.apply_request(Cancelled("other", "enough"))
        wait(lambda: core.jobs["other"].processes_gone)
        so_far = policy.allocations
        wait(lambda: policy.allocations > so_far + 2)
        assert (len(job.placement), len(job.lease)) == (1, 1)
        speeds = core.allocation.throughput.speeds(job)
        assert speeds[2] < speeds[1]


@pytest.mark.slow
@pytest.mark.gangs
def test_killed_as_it_grows_it_begins_again_grows_and_shrinks_for_others(
    tmp_path: Path, ramdisk: str
) -> None:
    """1 -> (killed) -> 1 -> 3 -> 1 ranks."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    path = tmp_path / "log"
    argv = command.command_line(as_ranks([SCRIPT, str(path), "0", "", "until-1-3-1"], 3))
    settings = Settings(device="cpu:0", ramdisk_dir=ramdisk, cpu_slots=4)
    core = Core([DeviceName("cpu", slot) for slot in range(3)], Gandiva(quantum_s=0.5, look_s=0.5))
    elastic = JobSpec(id="e", submit_s=0.0, least_devices=1, most_devices=3, max_restarts=1)
    went_on: list[Mapping[str, object]] = []

    def observe(event: Event, now: float, commands: Sequence[Command]) -> None:
        core.check()
        notes = [note for note in commands if isinstance(note, Notice)]
        went_on.extend(note.details for note in notes if note.what == "went_on")

    with Scheduler(core, tmp_path / "s", observer=observe) as scheduler:
        scheduler.submit(elastic, Program(tuple(argv), "/", command.environment(settings, environ)))
        job = core.jobs["e"]

        def err() -> str:
            return scheduler.local.processes.log("e", "err").read_text()

        assert scheduler.run(lambda: job.width == 3 or job.state.ended, timeout_s=PATIENCE_S), err()
        assert job.width == 3, err()
        os.kill(job.ranks[2].pid, signal.SIGKILL)
        assert scheduler.run(lambda: job.attempt == 1, timeout_s=PATIENCE_S), err()
        trains = [False]

        def grown() -> bool:
            whole = job.width == 3 and job.state is JobState.RUNNING
            trains[0] = whole and min(rank.boundary for rank in job.ranks) > 1
            return trains[0] or job.state.ended

        assert scheduler.run(grown, timeout_s=PATIENCE_S), err()
        assert trains[0], err()
        (note,) = went_on
        assert note["attempt"] == 2
        assert isinstance(boundary := note["boundary"], int)
        assert boundary > 0
        other = Program((sys.executable, RANK, "200", "0"), "/", {**environ, "WORLD": "2"})
        scheduler.submit(JobSpec(id="other", submit_s=0.0, devices=2), other)
        assert scheduler.run(
            lambda: all(one.state.ended and one.processes_gone for one in core.jobs.values()),
            timeout_s=PATIENCE_S,
        ), err()
        assert {one.state for one in core.jobs.values()} == {JobState.SUCCEEDED}, err()
    resized = last_attempts(logs(path, 3))
    epochs = max(line["epoch"] for line in resized[0] if "epoch" in line) + 1
    check_epochs(resized, epochs)
    check_equal(resized)
    alone = {**environ, "EPOCHS": str(epochs)}
    fixed = [sys.executable, SCRIPT, str(tmp_path / "fixed"), "0", ""]
    subprocess.run(fixed, env=alone, check=True, timeout=PATIENCE_S)
    check_close(resized[0], logs(tmp_path / "fixed", 1)[0])
