"""The scheduler with real trainings: the models are those of undisturbed runs, whatever happens to it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from gpuslice.client.client import Client
from gpuslice.verbs import JobInfo

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until

SCRIPT = Path(__file__).parents[2] / "gpuslice" / "demo" / "jobs" / "wine.py"
ATTACHED = Path(__file__).with_name("attached.py")
HELD = Path(__file__).with_name("held.py")
STEADY = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

#: Service after which 2das prefers others; many times what a short training takes.
THRESHOLD_S = 5.0
LONG, SHORT = 300, 5

pytestmark = [pytest.mark.slow, pytest.mark.trainings]


@cache
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


def submit(client: Client, steps: int, until: Path, **environ: str) -> str:
    """A training that makes 50 steps and then waits for a file."""
    return client.submit([str(HELD), str(until), "--steps", str(steps)], environ={**STEADY, **environ})


def finish(client: Client, jobs: list[str]) -> dict[str, JobInfo]:
    ended = {job: client.wait(job, PATIENCE_S) for job in jobs}
    return {name: job for name, job in ended.items() if job is not None}


def digest(client: Client, job: str) -> str:
    return Path(client.logs(job).out).read_text(encoding="utf-8").splitlines()[-1]


@dataclass(frozen=True)
class Ending:
    """How a training ended.

    Attributes
    ----------
    job
        What the scheduler says of it.
    after_steps
        How many steps all of them had made by then.
    digest
        Of its model.
    """

    job: JobInfo
    after_steps: int
    digest: str


def complete(shell: Shell, steps: list[int], enough: Path) -> list[Ending]:
    """Train so many steps under 2das, each job let in after the other once all have imported what they need.

    Long ones wait for the file ``enough``, which is there when the short ones have ended.
    """
    policy = ("2das", "--set", f"thresholds={THRESHOLD_S}")
    shell("up", "--devices", "cpu:1", "--switch-share", "0", "--policy", *policy)
    client = shell.client()
    jobs = []
    for count in steps:
        jobs.append(submit(client, count, enough))
        client.suspend(jobs[-1])
    until(client, jobs[0], lambda _: sum(event.what == "hello" for event in client.events()) == len(jobs))
    for job in jobs:
        client.resume(job)
    ended = finish(client, [job for job, count in zip(jobs, steps, strict=True) if count == SHORT])
    enough.touch()
    ended |= finish(client, jobs)
    made: dict[str, int] = {}
    after_steps: dict[str, int] = {}
    found: dict[str, Ending] = {}
    for event in client.events():
        if event.what in ("suspended", "bye"):
            made[event.job] = int(event.details["step"] or 0)
            after_steps[event.job] = sum(made.values())
        elif event.what == "exited":
            found[event.job] = Ending(ended[event.job], after_steps[event.job], digest(client, event.job))
    shell("down")
    return [found[job] for job in jobs]


@pytest.mark.repeats  # covered by sched_core/policies/tiresias
def test_short_trainings_do_not_wait_for_long_ones_under_2das(shell: Shell) -> None:
    """A long one comes first; 2das has to take the device from it, for it ends after all short ones."""
    steps = [LONG, SHORT, SHORT]
    with ThreadPoolExecutor() as pool:
        alone = pool.map(undisturbed, (LONG, SHORT))
        endings = complete(shell, steps, Path(f"{shell.directory}-enough"))
        expected: dict[int, str] = dict(zip((LONG, SHORT), alone, strict=True))
    assert [ending.digest for ending in endings] == [expected[count] for count in steps]
    long, *short = endings
    assert max(ending.after_steps for ending in short) < long.after_steps
    assert long.job.suspends > 0


def test_a_killed_training_goes_on_from_its_snapshot_after_a_move(shell: Shell, tmp_path: Path) -> None:
    epochs, killed = "60", tmp_path / "killed"
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
    job = client.submit([str(ATTACHED), epochs, str(killed)], environ=STEADY, max_restarts=1)
    before = until(client, job, lambda info: info.steps > 100)
    client.migrate(job, ["cpu:1" if before.devices == ("cpu:0",) else "cpu:0"])
    moved = until(client, job, lambda info: info.migrations == 1 and info.state == "running")
    assert moved.devices != before.devices
    (rank,) = (one for one in shell.processes_of(job) if one.cmdline()[1:2] == [str(ATTACHED)])
    rank.kill()
    killed.touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.restarts, ended.exit_code) == ("succeeded", 1, 0), ended
    assert digest(client, job) == alone.stdout.strip()
    (failed,) = [event for event in client.events() if event.what == "failed"]
    assert (failed.details["class"], failed.details["attempt"]) == ("infrastructure", 1)
    (went_on,) = [event for event in client.events() if event.what == "went_on"]
    assert went_on.details["attempt"] == 2
    assert went_on.details["boundary"] > 100
    made = int(client.read_log(job, err=True).split(b"made ")[1].split()[0])
    assert 0 < made < 60 * 64, "the second attempt did not begin at the beginning"
    assert ended.steps == 60 * 64, "and its steps are counted on"
    shell("down")
