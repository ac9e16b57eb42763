"""A script for torchrun's elastic launch, which knows no gpuslice, grows and shrinks under a scheduler."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuslice.config import Settings
from gpuslice.launch import command
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.program import Program
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.live.scheduler import Scheduler
from gpuslice.sched_core.policies.gandiva.policy import Gandiva
from gpuslice.types import DeviceName

from ..gpuslice.conftest import servers, train_undisturbed
from ..gpuslice.warm.process import Servers
from ..patience import PATIENCE_S
from . import torchrun_elastic

__all__ = ["servers"]

SCRIPT = str(Path(torchrun_elastic.__file__))
RANK = str(Path(__file__).with_name("rank.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture
def ramdisk() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gpuslice-test-", dir="/dev/shm") as directory:
        yield directory


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in directory.glob("log.*") for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.gangs
def test_it_grows_and_shrinks_and_sees_every_sample_once_an_epoch(
    tmp_path: Path, ramdisk: str, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 -> 2 -> 1 ranks; the result is that of one rank, but for the order of sums."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    resized, fixed = tmp_path / "resized", tmp_path / "fixed"
    resized.mkdir()
    fixed.mkdir()
    argv = command.command_line(["--", *TORCHRUN, SCRIPT, str(resized), "1-2-1"])
    settings = Settings(device="cpu:0", ramdisk_dir=ramdisk, cpu_slots=4)
    core = Core([DeviceName("cpu", slot) for slot in range(2)], Gandiva(quantum_s=0.5, look_s=0.5))
    spec = JobSpec(id="e", submit_s=0.0, least_devices=1, most_devices=2, relaunch=True)
    with Scheduler(core, tmp_path / "s", observer=lambda event, now, commands: core.check()) as scheduler:
        scheduler.submit(spec, Program(tuple(argv), "/", command.environment(settings, environ)))
        job = core.jobs["e"]

        def grown() -> bool:
            on = job.state is JobState.RUNNING and len(job.ranks) == 2
            return job.state.ended or (on and min(rank.boundary for rank in job.ranks) > 1)

        err = scheduler.local.processes.log("e", "err")
        assert scheduler.run(grown, timeout_s=PATIENCE_S), err.read_text()
        assert not job.state.ended, err.read_text()
        other = Program((sys.executable, RANK, str(tmp_path / "enough"), "0"), "/", dict(environ))
        scheduler.submit(JobSpec(id="other", submit_s=0.0), other)
        assert scheduler.run(lambda: job.state.ended, timeout_s=PATIENCE_S), err.read_text()
        assert (job.state, job.failures) == (JobState.SUCCEEDED, 0), err.read_text()
    written = lines(resized)
    epochs = max(line["epoch"] for line in written) + 1
    assert {line["width"] for line in written} == {1, 2}
    for epoch in range(epochs):
        seen = Counter(index for line in written if line["epoch"] == epoch for index in line["seen"])
        assert seen == Counter(range(torchrun_elastic.LENGTH))
    monkeypatch.setenv("EPOCHS", str(epochs))
    train_undisturbed(tmp_path, servers, 1, SCRIPT, str(fixed), "")
    ours, theirs = (torch.load(path / "checkpoint.pt")["model"]["weight"] for path in (resized, fixed))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
