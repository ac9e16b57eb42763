"""Real elastic trainings under a scheduler of three nodes: each is on one, and moves with its state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.config import Settings
from gpuslice.launch import command
from gpuslice.launch.rank_start import as_ranks
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Released
from gpuslice.sched_core.policy import Migrate, Plan, Policy, Start, View
from tests.gpuslice.elastic import training
from tests.gpuslice.elastic.checks import check_close, check_epochs, check_equal, last_attempts, logs

from ...patience import PATIENCE_S
from .. import torchrun_elastic
from .test_gangs_on_nodes import Gangs

TRAINING, TORCHRUN = str(Path(training.__file__)), str(Path(torchrun_elastic.__file__))
#: The scripts import modules of the tests.
PATHS = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[3])])

pytestmark = [pytest.mark.slow, pytest.mark.nodes]


class Directed:
    """Gives the job the devices that it is told to, also of nodes that the job may not be on."""

    name = "directed"
    needs_durations = False

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.devices = devices

    def plan(self, view: View) -> Plan:
        jobs = view.jobs.values()
        starts = [Start(job.id, self.devices) for job in jobs if not job.running]
        moves = [
            Migrate(job.id, self.devices) for job in jobs if job.running and job.placement != self.devices
        ]
        return Plan([*starts, *moves])


class Elastic(Gangs):
    """Two slots here, two on node b and two on c, and an elastic job that is first on b."""

    def policy(self) -> Policy:
        self.directed = Directed((2,))
        return self.directed

    def begin(self, *words: str, environ: dict[str, str], **spec: int) -> Gang:
        settings = Settings(device="cpu:0", ramdisk_dir=str(self.ramdisk("")), checkpoint_every=0)
        environ = command.environment(settings, {**os.environ, "OMP_NUM_THREADS": "1", **environ})
        program = Program(tuple(command.command_line(list(words))), "/", environ)
        # Processes are started where few are: here is one, which is no training.
        self.scheduler.submit(JobSpec(id="here", submit_s=0.0), Program(("sleep", "3600"), "/", environ))
        self.scheduler.submit(JobSpec(id="g", submit_s=0.0, most_devices=2, **spec), program)
        job = self.core.jobs["g"]
        self.train_on(2)
        return job

    def train_on(self, *devices: int) -> None:
        """Have it on ``devices``, and wait until it has made some steps there."""
        self.direct(*devices)
        job = self.core.jobs["g"]
        self.run(lambda: job.lease == devices and job.state is JobState.RUNNING and job.processes.trains)
        before = [rank.boundary for rank in job.members]
        self.run(lambda: all(one.boundary > at + 2 for one, at in zip(job.members, before, strict=True)))

    def direct(self, *devices: int) -> None:
        self.directed.devices = devices
        self.core.state.plan_due = True

    def succeeds(self) -> None:
        assert self.finish("g") == [JobState.SUCCEEDED], self.output("g", "err")[-4000:]


@pytest.fixture(params=[PATIENCE_S])
def site(tmp_path: Path, ramdisks: Path, request: pytest.FixtureRequest) -> Iterator[Elastic]:
    made = Elastic(tmp_path, ramdisks, request.param)
    try:
        made.begin_agents()
        yield made
    finally:
        made.close()


def fixed(directory: Path, epochs: int) -> list[dict[str, object]]:
    """What one rank alone writes down."""
    words = [sys.executable, TRAINING, str(directory / "fixed"), "0", ""]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "EPOCHS": str(epochs)}
    subprocess.run(words, env=environ, check=True, timeout=PATIENCE_S)
    return logs(directory / "fixed", 1)[0]


def test_it_grows_shrinks_and_moves_and_sees_every_sample_once(site: Elastic, tmp_path: Path) -> None:
    words = as_ranks([TRAINING, str(tmp_path / "log"), "0", "", "until-1-2-1-2-1"], 2)
    job = site.begin(*words, environ={"PYTHONPATH": PATHS})
    site.train_on(2, 3)
    site.train_on(3)
    assert job.nodes == (1, 1)
    site.train_on(4, 5)
    assert job.nodes == (2, 2)
    site.direct(4)
    site.succeeds()
    assert (job.nodes, job.failures) == ((2, 2), 0)
    resized = logs(tmp_path / "log", 2)
    epochs = max(line["epoch"] for line in resized[0] if "epoch" in line) + 1
    check_epochs(resized, epochs)
    check_equal(resized)
    check_close(resized[0], fixed(tmp_path, epochs))


@pytest.mark.parametrize("site", [20.0], indirect=True)
def test_after_its_node_has_died_it_goes_on_from_the_copy_of_rank_0(site: Elastic, tmp_path: Path) -> None:
    site.replicate()
    words = as_ranks([TRAINING, str(tmp_path / "log"), "0", "", "until-1-2-1"], 2)
    job = site.begin(*words, environ={"PYTHONPATH": PATHS}, max_restarts=1, wait_for_node_s=0)
    site.train_on(2, 3)
    site.park(job)
    site.run(lambda: site.noted == ["replicated"])
    site.scheduler.apply_request(Released("g"))
    site.train_on(2, 3)
    site.lose("b")
    site.direct(4)
    site.run(lambda: bool(site.notes("went_without")))
    site.succeeds()
    assert (1 in job.nodes, job.failures) == (False, 0)
    both = logs(tmp_path / "log", 2)
    assert [line.get("step") for line in both[0]].count(0) == 1, "it did not begin anew"
    check_epochs(last_attempts(both), both[0][-2]["epoch"] + 1)  # what came after that was lost, and not due


@pytest.mark.repeats  # covered by sched_core/test_torchrun_elastic.py
def test_a_torchrun_command_is_started_anew_on_its_node(site: Elastic, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", TORCHRUN, str(tmp_path), "1-2-1"]
    job = site.begin("--", *words, environ={}, relaunch=True)
    site.train_on(2, 3)
    site.direct(0)  # where it cannot be
    site.run(lambda: job.lease in ((2,), (3,)) or job.state.ended)
    site.succeeds()
    assert (set(job.nodes), job.failures) == ({1}, 0)
    written = [json.loads(line) for path in tmp_path.glob("log.*") for line in path.read_text().splitlines()]
    assert {line["width"] for line in written} == {1, 2}
    for epoch in range(max(line["epoch"] for line in written) + 1):
        seen = Counter(index for line in written if line["epoch"] == epoch for index in line["seen"])
        assert seen == Counter(range(torchrun_elastic.LENGTH))
