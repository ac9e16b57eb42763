"""Trials, from outside: a broken job fails although the device is taken, a sound one queues."""

from __future__ import annotations

import sys

from .conftest import RANK, Shell
from .waiting import until


def test_a_broken_job_fails_early_and_a_sound_one_takes_its_turn(shell: Shell) -> None:
    shell("up", "--devices", "null:1", "--policy", "fifo")
    client = shell.client()
    first = shell.submit(10**6, name="first")
    until(client, first, lambda info: info.steps > 0)

    def submit(*words: str) -> str:
        return shell("submit", "--trial", *words, sys.executable, str(RANK), "100000", "0").strip()

    sound = submit("--name", "sound", "--")
    broken = shell(
        "submit",
        *("--trial", "--name", "broken", "--max-restarts", "3", "--env", "WORLD=1"),
        *("--", sys.executable, str(RANK), "2", "1"),
    ).strip()
    shell("wait", broken, "--timeout", "60s", code=1)
    (failed,) = [event for event in client.events() if event.what == "trial_failed"]
    assert (failed.job, failed.details["class"], failed.details["restart_in_s"]) == (broken, "user", None)
    passed = until(client, sound, lambda info: info.trial == "passed" and info.state == "suspended")
    assert passed.steps >= 5
    back = until(client, first, lambda info: info.state == "running")
    assert back.switches >= 1
    found = {job.id: (job.trial, job.restarts) for job in client.jobs()}
    assert found == {first: (None, 0), sound: ("passed", 0), broken: ("failed", 0)}
    shell("cancel", first)
    until(client, sound, lambda info: info.state == "running")
    shell("down")
