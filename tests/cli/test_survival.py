"""The scheduler is killed, and another takes over: no job, no submission, no exit code is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from gpuslice.client.client import Client
from gpuslice.errors import EnvironmentUnusableError, UsageError
from gpuslice.sched_core.journal.journal import FILE
from gpuslice.verbs import JobInfo

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until


def states(client: Client) -> dict[str, str]:
    return {job.id: job.state for job in client.jobs()}


def finish(client: Client) -> dict[str, JobInfo]:
    ended = [client.wait(job.id, PATIENCE_S) for job in client.jobs()]
    return {job.id: job for job in ended if job is not None}


def test_jobs_run_on_or_stay_parked_and_the_next_scheduler_goes_on_with_them(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    jobs = [shell.submit(2000), shell.submit(2000)]
    for job in jobs:
        until(client, job, lambda info: info.slices > 0)
    shell.kill()
    shell.up()
    ended = finish(client)
    assert {name: job.state for name, job in ended.items()} == dict.fromkeys(jobs, "succeeded")
    assert all(client.read_log(job).endswith(b"ends at 2000\n") for job in jobs)
    shell("down")


def test_a_job_that_ends_while_there_is_no_scheduler_keeps_its_exit_code(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    enough = shell.directory / "enough"
    job = shell.submit(enough, 7)
    until(client, job, lambda info: info.state == "running")
    (supervisor,) = [
        one for one in psutil.Process(shell.pid).children() if "supervisor" in " ".join(one.cmdline())
    ]
    shell.kill()
    enough.touch()
    psutil.wait_procs([supervisor], timeout=PATIENCE_S)
    shell.up()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.exit_code, ended.state) == (7, "failed")
    shell("down")


def test_a_gang_is_taken_over_whole(shell: Shell) -> None:
    words = ("--devices", "null:2", "--quantum", "100ms")
    shell("up", *words)
    client = shell.client()
    pair, alone = shell.submit(400, ranks=2), shell.submit(400)
    until(client, alone, lambda info: info.slices > 0)
    shell.kill()
    shell("up", *words)
    assert {name: job.state for name, job in finish(client).items()} == dict.fromkeys(
        [pair, alone], "succeeded"
    )
    shell("down")


def test_what_the_owner_wants_survives_too(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    enough = shell.directory / "enough"
    job = shell.submit(enough)
    until(client, job, lambda info: info.state == "running")
    client.suspend(job)
    until(client, job, lambda info: info.state == "suspended")
    shell.kill()
    shell.up()
    (found,) = client.jobs()
    assert (found.state, found.held) == ("suspended", True)
    client.resume(job)
    enough.touch()
    assert finish(client)[job].state == "succeeded"
    shell("down")


def test_a_signal_ends_the_scheduler_and_not_its_jobs(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    job = shell.submit(10**6)
    until(client, job, lambda info: info.state == "running")
    for number in (signal.SIGTERM, signal.SIGINT):
        scheduler = psutil.Process(shell.pid)
        scheduler.send_signal(number)
        psutil.wait_procs([scheduler], timeout=PATIENCE_S)
        shell.up()
        assert states(client) == {job: "running"}
    client.cancel(job)
    assert finish(client)[job].state == "cancelled"
    shell("down")


@pytest.mark.slow
def test_other_options_are_refused_while_jobs_are_unfinished(shell: Shell) -> None:
    shell.up()
    job = shell.submit(10**6)
    shell.kill()
    assert "it had --devices null:0 --policy rr" in shell("up", "--devices", "null:2", code=2)
    shell.up()
    shell("cancel", job)
    shell("wait", job, code=143)
    shell("down")
    shell("up", "--devices", "null:2", "--policy", "2das")
    assert (shell.directory / "past-1" / FILE).exists()
    assert shell.status().jobs == ()
    shell("down")


def test_a_full_disk_ends_the_scheduler_and_not_its_jobs(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    job = shell.submit(10**6)
    until(client, job, lambda info: info.state == "running")
    scheduler = psutil.Process(shell.pid)
    # No file may grow any more: what a full disk looks like from inside.
    scheduler.rlimit(psutil.RLIMIT_FSIZE, (0, -1))
    with pytest.raises(EnvironmentUnusableError, match="no scheduler runs"):
        shell.submit(10)
    psutil.wait_procs([scheduler], timeout=PATIENCE_S)
    assert not scheduler.is_running()
    shell.up()
    assert states(client) == {job: "running"}, "what could not be written was not begun"
    client.cancel(job)
    assert finish(client)[job].state == "cancelled"
    shell("down")


OPTIONS = ("up", "--devices", "null:1", "--quantum", "100ms")


def test_a_damaged_journal_is_refused_until_told_and_no_log_is_overwritten(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    lost = shell.submit(10, name="lost")
    numbered = shell.submit(10)
    finish(client)
    output = client.read_log(lost)
    shell.kill()
    log = shell.directory / f"{FILE}-wal"
    data = bytearray(log.read_bytes())
    data[200] ^= 1
    log.write_bytes(data)
    said = shell(*OPTIONS, code=4)
    assert "is damaged: it ends with event 0" in said
    assert f"logs of jobs that it does not know: {lost}, {numbered}" in said
    assert "--accept-loss" in said
    assert log.read_bytes() == bytes(data)
    shell(*OPTIONS, "--accept-loss")
    assert shell.status().jobs == ()
    with pytest.raises(UsageError, match="there are logs of a job 'lost'"):
        shell.submit(10, name="lost")
    assert shell.submit(10) != numbered
    assert (shell.directory / "logs" / "lost.out").read_bytes() == output
    finish(client)
    shell("down")


def test_up_says_that_the_disk_is_full(shell: Shell) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuslice", *OPTIONS],
        env={**os.environ, "GPUSLICE_STATE_DIR": str(shell.directory)},
        # No file may grow: what a full disk looks like from inside.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot use" in done.stderr
    assert "make room" in done.stderr
    assert "Traceback" not in done.stderr
    shell.up()
    shell("down")


def test_what_a_job_left_behind_is_gone_when_it_has_ended(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    job = client.submit(["--", "sh", "-c", "setsid sleep 1000 & echo $!"])
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    assert not psutil.pid_exists(int(client.read_log(job)))
    shell("down")
