"""Faults of the table in docs/recovery.md, made on purpose: each ends as the table says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq

from gpuslice.client.client import Client
from gpuslice.sched_core.nodes.endpoint import CLIENT_SOCKET
from gpuslice.wire import MAX_MESSAGE_BYTES

from ..patience import PATIENCE_MS, PATIENCE_S
from .conftest import RANK, Shell
from .test_training import digest, submit, undisturbed
from .waiting import until

ENDLESS = 10**6
#: Of a training.
STEPS = 80


def command(shell: Shell, job: str) -> psutil.Process:
    """The process that ``job`` is, below its supervisor."""
    (process,) = shell.processes_of(job)
    return process


def stop(shell: Shell, job: str) -> psutil.Process:
    """Stop the process that ``job`` is: until it has noticed it would die of SIGTERM, or take orders."""
    process = command(shell, job)
    process.suspend()
    tasks = Path(f"/proc/{process.pid}/task")
    while any(psutil.Process(int(task.name)).status() != psutil.STATUS_STOPPED for task in tasks.iterdir()):
        time.sleep(0.01)
    return process


def running(shell: Shell, client: Client, *options: str) -> str:
    """A job that is on the device, and would stay there for long. Told to end, it has a second."""
    words = ["--", sys.executable, str(RANK), str(ENDLESS), "0", *options]
    job = client.submit(words, grace_s=1.0)
    until(client, job, lambda info: info.state == "running")
    return job


def goes_on(shell: Shell, client: Client) -> None:
    """The device is free for others, and nobody is lost."""
    after = client.wait(shell.submit(20), PATIENCE_S)
    assert after is not None
    assert after.state == "succeeded"
    assert all(device.jobs == () for device in client.status().devices)


def test_a_job_that_is_killed_has_failed_and_the_next_runs(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    job = running(shell, client)
    command(shell, job).kill()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.exit_code, ended.failure) == ("failed", -signal.SIGKILL, "infrastructure")
    goes_on(shell, client)
    shell("down")


@pytest.mark.parametrize("when", ["parking", "returning"])
def test_a_job_that_dies_in_the_middle_of_a_switch_has_failed_and_the_other_runs(
    shell: Shell, when: str
) -> None:
    shell.up()
    client = shell.client()
    job = running(shell, client, "--dies", when)
    other = client.wait(shell.submit(400), PATIENCE_S)
    assert other is not None
    assert other.state == "succeeded"
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.exit_code) == ("failed", -signal.SIGKILL)
    goes_on(shell, client)
    shell("down")


def test_with_its_supervisor_everything_of_a_job_goes(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    # One that never greets the scheduler, with a child in a session of its own.
    script = "import os, signal\nos.fork() or os.setsid()\nsignal.pause()\n"
    job = client.submit(["--", sys.executable, "-c", script])
    (supervisor,) = psutil.Process(shell.pid).children()
    while len(family := supervisor.children(recursive=True)) < 2:
        client.wait(job, 0.05)
    supervisor.kill()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert ended.state == "failed"
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
    goes_on(shell, client)
    shell("down")


def test_a_stopped_job_keeps_its_device_until_it_goes_on(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    stopped = running(shell, client)
    process = stop(shell, stopped)
    waiting = shell.submit(20)
    until(client, stopped, lambda info: info.state == "suspending")
    (found,) = [job for job in client.jobs() if job.id == waiting]
    assert (found.state, found.devices) == ("queued", ())
    process.resume()
    ended = client.wait(waiting, PATIENCE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    until(client, stopped, lambda info: info.state == "running")
    shell("down")


def test_a_stopped_job_can_be_cancelled(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    stopped = running(shell, client)
    stop(shell, stopped)
    client.cancel(stopped)
    ended = client.wait(stopped, PATIENCE_S)
    assert ended is not None
    assert (ended.state, ended.exit_code) == ("cancelled", -signal.SIGKILL)
    goes_on(shell, client)
    shell("down")


def test_ten_thousand_garbage_frames_and_an_oversize_one_disturb_no_user(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
        stranger.connect(f"ipc://{shell.directory / CLIENT_SOCKET}")
        for number in range(10_000):
            stranger.send_multipart([b"%d" % number, os.urandom(number % 50)])
            while stranger.poll(0):
                stranger.recv_multipart()
        stranger.send(bytes(MAX_MESSAGE_BYTES + 1))
        goes_on(shell, client)
    shell("down")


@pytest.mark.slow
def test_with_a_full_ram_disk_a_job_runs_on_and_nothing_is_lost(shell: Shell) -> None:
    shell("up", "--devices", "cpu:1", "--quantum", "200ms", "--ramdisk-limit", "64K")
    client = shell.client()
    ramdisk, enough = shell.directory.parent / "ramdisk", shell.directory.parent / "enough"
    jobs = [submit(client, STEPS, enough, GPUSLICE_RAMDISK_DIR=str(ramdisk)) for _ in range(2)]
    until(client, jobs[0], lambda _: any(event.what == "refused" for event in client.events()))
    enough.touch()
    ended = [client.wait(job, PATIENCE_S) for job in jobs]
    assert [job and (job.state, job.exit_code) for job in ended] == [("succeeded", 0)] * 2
    refused = [event for event in client.events() if event.what == "refused"]
    assert refused
    assert all(event.details["running"] and event.details["retryable"] for event in refused)
    assert {digest(client, job) for job in jobs} == {undisturbed(STEPS)}
    said = "".join(Path(client.logs(job).err).read_text() for job in jobs)
    assert "RAM disk" in said
    shell("down")


@pytest.mark.slow
def test_with_a_spill_directory_more_jobs_take_turns_than_have_room(shell: Shell) -> None:
    spill = shell.directory.parent / "spill"
    options = ("--ramdisk-limit", "9M", "--spill-dir", str(spill))  # a slot takes 4 MiB at least
    shell("up", "--devices", "cpu:1", "--quantum", "200ms", "--switch-share", "0", *options)
    client = shell.client()
    ramdisk, enough = shell.directory.parent / "ramdisk", shell.directory.parent / "enough"
    reports = [shell.directory.parent / f"{number}.json" for number in range(3)]
    jobs = [
        submit(client, STEPS, enough, GPUSLICE_RAMDISK_DIR=str(ramdisk), GPUSLICE_REPORT=str(report))
        for report in reports
    ]
    for job in jobs:  # twice round: the last one to park for the first time needed room, and it came back
        until(client, job, lambda info: info.slices > 2)
    enough.touch()
    ended = [client.wait(job, PATIENCE_S) for job in jobs]
    assert [job and (job.state, job.exit_code) for job in ended] == [("succeeded", 0)] * 3
    assert {digest(client, job) for job in jobs} == {undisturbed(STEPS)}
    switches = [switch for report in reports for switch in json.loads(report.read_text())["switches"]]
    assert any(switch["fetch_s"] > 1e-4 for switch in switches)  # some were spilled and came back
    assert not list(spill.glob("*.gsnp"))
    shell("down")
