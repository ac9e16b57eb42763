"""The scheduler is killed while a torchrun job is being started anew for another number of devices."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from gpuslice.client.client import Client
from gpuslice.sched_core.nodes.processes import GRACE_S
from gpuslice.verbs import JobInfo

from ..patience import PATIENCE_S
from ..sched_core import torchrun_elastic
from .conftest import Shell
from .waiting import until

SCRIPT = str(Path(torchrun_elastic.__file__))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
UP = ("up", "--devices", "cpu:2", "--policy", "gandiva", "--quantum", "500ms", "--set", "look_s=0.5")

pytestmark = [pytest.mark.slow, pytest.mark.trainings]


def relaunching(client: Client, job: str) -> None:
    until(client, job, lambda info: info.state == "relaunching")


def trains_on(client: Client, job: str, devices: int) -> JobInfo:
    return until(
        client, job, lambda info: info.state == "running" and len(info.devices) == devices and info.steps > 1
    )


def all_of(shell: Shell, job: str) -> list[psutil.Process]:
    return shell.processes_of(job) + shell.processes_of(job, supervisors=True)


def comes_from(former: list[psutil.Process], process: psutil.Process) -> bool:
    """Whether it is one of those or was started by one, or has ended."""
    try:
        return process in former or process.ppid() in {one.pid for one in former}
    except psutil.NoSuchProcess:
        return True


def stopped(shell: Shell, job: str, former: list[psutil.Process]) -> list[psutil.Process]:
    """Stop the launcher that is to start the ranks, as soon as there is one."""
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        new = [process for process in shell.processes_of(job) if not comes_from(former, process)]
        if new:
            for process in new:
                process.suspend()
            return new
    raise AssertionError("the job was not started anew")


def test_the_job_goes_on_with_the_next_scheduler(shell: Shell, tmp_path: Path) -> None:
    """Before the old command has ended, after it has, and before the new one has said who it is."""
    may_end, enough = tmp_path / "may_end", tmp_path / "enough"
    shell(*UP)
    client = shell.client()
    words = ["--", *TORCHRUN, SCRIPT, str(tmp_path), "1-2-1-2", str(may_end)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GPUSLICE_CPU_SLOTS": "4"}
    job = client.submit(words, devices=1, most_devices=2, environ=environ)

    relaunching(client, job)  # 1 -> 2
    shell.kill()
    shell(*UP)
    # It has a state to save, and may take longer for that than others who are told to end.
    assert client.wait(job, GRACE_S + 1.0) is None
    relaunching(client, job)
    may_end.touch()
    trains_on(client, job, 2)

    may_end.unlink()
    other = shell.submit(enough)
    relaunching(client, job)  # 2 -> 1
    shell.kill()
    left = all_of(shell, job)
    may_end.touch()
    assert not psutil.wait_procs(left, timeout=PATIENCE_S)[1], "nobody ends it but itself"
    shell(*UP)
    trains_on(client, job, 1)

    former = shell.processes_of(job)
    enough.touch()  # 1 -> 2
    launcher = stopped(shell, job, former)
    shell.kill()
    shell(*UP)
    (found,) = [info for info in client.jobs() if info.id == job]
    assert (found.state, found.devices) == ("queued", ())
    for process in launcher:
        process.resume()
    ended = client.wait(job, PATIENCE_S)
    told = Path(client.logs(job).err).read_text(encoding="utf-8")
    assert ended is not None, told
    assert (ended.state, ended.restarts) == ("succeeded", 0), told
    assert [event.what for event in client.events() if event.job == job].count("relaunched") == 3
    check_samples(tmp_path)
    shell("wait", other)
    shell("down")


def check_samples(directory: Path) -> None:
    """Every sample was seen once an epoch: no checkpoint was lost, and none was gone back to."""
    lines = [json.loads(line) for path in directory.glob("log.*") for line in path.read_text().splitlines()]
    assert {line["width"] for line in lines} == {1, 2}
    for epoch in range(max(line["epoch"] for line in lines) + 1):
        seen = Counter(index for line in lines if line["epoch"] == epoch for index in line["seen"])
        assert seen == Counter(range(torchrun_elastic.LENGTH)), epoch
