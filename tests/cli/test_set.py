"""``gpuslice set``: settings change while the scheduler runs, and hold when it is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuslice.errors import UsageError

from ..patience import PATIENCE_S
from .conftest import Shell
from .test_training import ATTACHED, STEADY
from .waiting import until


def settings(shell: Shell, *words: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(shell("set", *words, "--json"))
    return found


def test_settings_hold_when_the_scheduler_is_killed_and_the_next_one_states_others(shell: Shell) -> None:
    shell("up", "--devices", "null:1", "--prestart", "0")
    job = shell.submit(10**6)
    assert shell("set").splitlines()[2].split() == ["policy", "rr"]
    words = ("policy=2das", "quantum=30s", "2das.thresholds=6,18", "devices=null:0,null:2", "grace=1s")
    assert settings(shell, *words)["devices"] == "null:0,null:2"
    assert "did you mean 'las'" in shell("set", "policy=lass", "grace=5s", code=2)
    with pytest.raises(UsageError, match="read when the scheduler starts"):
        shell.client().set("metrics-port=9")
    shell.kill()
    assert shell.status().policy == "2das", "read from the journal"
    shell("up", "--devices", "null:1", "--quantum", "5s", "--prestart", "0")
    found = settings(shell)
    assert [found[name] for name in ("policy", "quantum", "2das.thresholds", "devices", "grace")] == [
        *("2das", "5s", "6,18", "null:0", "1s")
    ]
    told = [json.loads(line) for line in shell("events", "--json").splitlines()]
    changes = [one["details"] for one in told if one["what"] == "settings_changed"]
    assert [one["2das.first_slice_s"] for one in changes] == ["30.0", "5.0"]
    assert [one.name for one in shell.status().devices] == ["null:0"]
    shell("cancel", job)
    assert shell.client().wait(job, PATIENCE_S) is not None


@pytest.mark.slow
@pytest.mark.trainings
def test_trainings_are_undisturbed_by_another_policy_quantum_and_devices(
    shell: Shell, tmp_path: Path
) -> None:
    enough = tmp_path / "enough"
    shell("up", "--devices", "cpu:1", "--policy", "fifo")
    client = shell.client()
    alone = client.submit([str(ATTACHED), "3"], name="alone", environ=STEADY)
    assert client.wait(alone, PATIENCE_S) is not None
    jobs = [
        client.submit([str(ATTACHED), "3", str(enough)], name=name, environ=STEADY)
        for name in ("a", "b", "c")
    ]
    until(client, "a", lambda info: info.steps > 20)
    client.set("policy=rr", "quantum=200ms")
    for job in jobs:
        until(client, job, lambda info: info.steps > 20)
    shell.kill()
    shell("up", "--devices", "cpu:1", "--policy", "rr")
    client = shell.client()
    assert client.set()["quantum"] == "0.2s"
    client.set("devices=cpu:2")
    until(client, "a", lambda info: True)
    client.migrate("a", ["cpu:1"])
    until(client, "a", lambda info: info.devices == ("cpu:1",) and info.state == "running")
    client.set("devices=cpu:1")
    enough.touch()
    for job in jobs:
        ended = client.wait(job, PATIENCE_S)
        assert ended is not None
        assert (ended.state, ended.restarts) == ("succeeded", 0)
    digests = {job: Path(client.logs(job).out).read_text().split()[-1] for job in (alone, *jobs)}
    assert len(set(digests.values())) == 1, digests
    assert [one.name for one in client.status().devices] == ["cpu:0"]
