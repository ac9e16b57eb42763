"""The scheduler with real trainings: the models are those of undisturbed runs, whatever happens to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import psutil
import pytest

from gpuslice.client import Client
from gpuslice.verbs import JobInfo

from .conftest import Shell
from .waiting import until

SCRIPT = Path(__file__).parents[2] / "gpuslice" / "demo" / "jobs" / "wine.py"
ATTACHED = Path(__file__).with_name("attached.py")
STEADY = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PATIENCE_S = 1800.0

pytestmark = pytest.mark.slow


def undisturbed(steps: int) -> str:
    """What the script prints last, on its own: its digest."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", str(steps)],
        env=STEADY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def submit(client: Client, steps: int) -> str:
    return client.submit([str(SCRIPT), "--steps", str(steps)], environ=STEADY)


def finish(client: Client, jobs: list[str]) -> dict[str, JobInfo]:
    ended = {job: client.wait(job, PATIENCE_S) for job in jobs}
    return {name: job for name, job in ended.items() if job is not None}


def digest(client: Client, job: str) -> str:
    return Path(client.logs(job).out).read_text(encoding="utf-8").splitlines()[-1]


def test_trainings_survive_the_kill_of_their_scheduler(shell: Shell) -> None:
    options = ("--devices", "cpu:1", "--quantum", "500ms")
    shell("up", *options)
    client = shell.client()
    jobs = [submit(client, 2000), submit(client, 2000)]
    for job in jobs:
        until(client, job, lambda info: info.slices > 1)
    shell.kill()
    shell("up", *options)
    ended = finish(client, jobs)
    assert {name: job.state for name, job in ended.items()} == dict.fromkeys(jobs, "succeeded")
    assert all(job.suspends > 0 for job in ended.values())
    assert {digest(client, job) for job in jobs} == {undisturbed(2000)}
    shell("down")


def complete(shell: Shell, policy: tuple[str, ...], steps: list[int]) -> tuple[list[float], list[str]]:
    """Trainings of so many steps, submitted in this order: their completion times and digests."""
    shell("up", "--devices", "cpu:1", *policy)
    client = shell.client()
    jobs = [submit(client, steps[0])]
    until(client, jobs[0], lambda info: info.state == "running")  # or another might be ready before it
    jobs += [submit(client, count) for count in steps[1:]]
    ended = finish(client, jobs)
    found = [ended[job].age_s for job in jobs], [digest(client, job) for job in jobs]
    shell("down")
    return found


def test_2das_and_fifo_train_the_same_models(shell: Shell) -> None:
    """The table that it prints is no assertion: how long jobs take depends on what else the machine does."""
    long, short = 6_000, 200
    steps = [long, long, *[short] * 5]
    expected = {count: undisturbed(count) for count in (long, short)}
    fifo_s, fifo_digests = complete(shell, ("--policy", "fifo"), steps)
    las_s, las_digests = complete(shell, ("--policy", "2das", "--set", "thresholds=5"), steps)
    print("\n  steps   fifo JCT   2das JCT")
    for row in zip(steps, fifo_s, las_s, strict=True):
        print("{:7}  {:7.1f} s  {:7.1f} s".format(*row))
    print(f"average  {mean(fifo_s):7.1f} s  {mean(las_s):7.1f} s")
    assert fifo_digests == las_digests == [expected[count] for count in steps]


def rank_of(job: str) -> psutil.Process:
    """The training process of an attached job."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environ = process.info["cmdline"] or [], process.info["environ"] or {}
        if environ.get("GPUSLICE_JOB") == job and words[1:2] == [str(ATTACHED)]:
            return process
    raise AssertionError(job)


def test_a_killed_training_goes_on_from_its_snapshot_after_a_move(shell: Shell) -> None:
    epochs = "60"
    alone = subprocess.run(
        [sys.executable, str(ATTACHED), epochs],
        env=STEADY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    shell("up", "--devices", "cpu:2")
    client = shell.client()
    job = client.submit([str(ATTACHED), epochs], environ=STEADY, max_restarts=1)
    before = until(client, job, lambda info: info.steps > 100)
    client.migrate(job, ["cpu:1" if before.devices == ("cpu:0",) else "cpu:0"])
    moved = until(client, job, lambda info: info.migrations == 1 and info.state == "running")
    assert moved.devices != before.devices
    rank_of(job).kill()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.restarts, ended.exit_code) == ("succeeded", 1, 0), ended
    assert digest(client, job) == alone.stdout.strip()
    (failed,) = [event for event in client.events() if event.what == "failed"]
    assert (failed.details["class"], failed.details["attempt"]) == ("infrastructure", 1)
    made = int(client.read_log(job, err=True).split(b"made ")[1].split()[0])
    assert 0 < made < 60 * 64, "the second attempt did not begin at the beginning"
    assert ended.steps == 60 * 64, "and its steps are counted on"
    shell("down")
