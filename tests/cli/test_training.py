"""The scheduler with real trainings: the models are those of undisturbed runs, whatever happens to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpuslice.client import Client
from gpuslice.verbs import JobInfo

from .conftest import Shell
from .waiting import until

SCRIPT = Path(__file__).parents[2] / "gpuslice" / "demo" / "jobs" / "wine.py"
STEADY = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PATIENCE_S = 600.0

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
    jobs = [submit(client, 4000), submit(client, 4000)]
    for job in jobs:
        until(client, job, lambda info: info.slices > 1)
    scheduler = psutil.Process(shell.pid)
    scheduler.kill()
    psutil.wait_procs([scheduler], timeout=30.0)
    shell("up", *options)
    ended = finish(client, jobs)
    assert {name: job.state for name, job in ended.items()} == dict.fromkeys(jobs, "succeeded")
    assert all(job.suspends > 0 for job in ended.values())
    assert {digest(client, job) for job in jobs} == {undisturbed(4000)}
    shell("down")


def average_s(shell: Shell, policy: tuple[str, ...], long: int, short: int) -> tuple[float, set[str]]:
    """Two long and five short trainings: their average completion time, and the digests of both kinds."""
    shell("up", "--devices", "cpu:1", *policy)
    client = shell.client()
    first = submit(client, long)
    until(client, first, lambda info: info.state == "running")  # or another might be ready before it
    second = submit(client, long)
    ended = finish(client, [first, second, *(submit(client, short) for _ in range(5))])
    digests = {digest(client, job) for job in ended}
    print("\n", policy, {name: round(job.age_s, 1) for name, job in ended.items()})
    shell("down")
    return sum(job.age_s for job in ended.values()) / 7, digests


def test_2das_halves_the_average_completion_time_of_fifo(shell: Shell) -> None:
    long, short = 24_000, 200
    expected = {undisturbed(long), undisturbed(short)}
    fifo_s, fifo_digests = average_s(shell, ("--policy", "fifo"), long, short)
    las_s, las_digests = average_s(shell, ("--policy", "2das", "--set", "thresholds=2"), long, short)
    print(f"fifo {fifo_s:.1f} s, 2das {las_s:.1f} s on average")
    assert fifo_digests == las_digests == expected
    assert fifo_s >= 2 * las_s
