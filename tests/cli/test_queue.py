"""A queue of jobs that are not started: over the end of a scheduler, and at its own end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuslice.cli import client_commands
from gpuslice.client.client import Client

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until

OPTIONS = ("up", "--devices", "null:1", "--policy", "fifo", "--prestart", "1")


def started(client: Client) -> list[str]:
    return [job.id for job in client.jobs() if job.started]


def test_jobs_that_were_never_started_are_started_by_the_next_scheduler(shell: Shell) -> None:
    shell(*OPTIONS)
    client = shell.client()
    enough = shell.directory / "enough"
    jobs = [shell.submit(enough)]
    # The device goes to whoever is ready first; of two that import torch side by side that may be either.
    until(client, jobs[0], lambda info: info.state == "running")
    jobs += [shell.submit(20) for _ in range(5)]
    assert started(client) == jobs[:2]
    client.suspend(jobs[2])
    client.cancel(jobs[3])
    shell.kill()
    shell(*OPTIONS)
    assert started(client) == jobs[:2]
    enough.touch()
    for job in (jobs[4], jobs[5]):
        ended = client.wait(job, PATIENCE_S)
        assert ended is not None
        assert ended.state == "succeeded"
    assert started(client) == [*jobs[:2], *jobs[4:]]
    client.resume(jobs[2])
    ended = client.wait(jobs[2], PATIENCE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    found = {job.id: job for job in client.jobs()}[jobs[3]]
    assert (found.state, found.started) == ("cancelled", False)
    shell("down")


def test_the_log_of_a_job_that_has_yet_to_be_started_is_empty_and_can_be_followed(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    shell(*OPTIONS)
    client, script = shell.client(), "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.05)"
    enough = shell.directory / "enough"
    ahead = [client.submit(["--", sys.executable, "-c", script.format(str(enough))]) for _ in range(2)]
    told = client.submit(["--", "echo", "told"])
    assert started(client) == ahead
    assert client_commands.logs(told, state_dir=shell.directory) == 0
    assert capfd.readouterr() == ("", f"gpuslice: job {told} has printed nothing so far\n")
    assert client_commands.logs(told, stderr=True, state_dir=shell.directory) == 0
    assert capfd.readouterr() == ("", "")
    with subprocess.Popen(
        [sys.executable, "-m", "gpuslice", "logs", told, "-f", "--state-dir", str(shell.directory)],
        stdout=subprocess.PIPE,
        text=True,
    ) as following:
        with pytest.raises(subprocess.TimeoutExpired):
            following.wait(0.5)
        enough.touch()
        assert following.communicate(timeout=PATIENCE_S)[0] == "told\n"
        assert following.returncode == 0
    shell("down")


def test_down_starts_none_of_those_that_wait(shell: Shell) -> None:
    shell(*OPTIONS)
    client = shell.client()
    for _ in range(8):
        client.submit(["--", "sleep", "1000"])
    begun = started(client)
    assert len(begun) == 2
    shell("down")
    assert {path.stem for path in (shell.directory / "logs").iterdir()} == set(begun)


def test_a_drained_queue_is_worked_off(shell: Shell) -> None:
    shell(*OPTIONS)
    jobs = [shell.submit(20) for _ in range(6)]
    shell("down", "--drain")
    assert all((shell.directory / "logs" / f"{job}.out").read_text().endswith("ends at 20\n") for job in jobs)
