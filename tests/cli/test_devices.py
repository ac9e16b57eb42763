"""Devices that are paused, drained and reserved by commands, while jobs want them."""

from __future__ import annotations

import json

import pytest

from gpuslice.cli import main

from ..patience import PATIENCE_S
from .conftest import Shell
from .waiting import until

UP = ("up", "--devices", "null:2", "--policy", "fifo")


class Terminal:
    """Runs commands in this process."""

    def __init__(self, shell: Shell, capfd: pytest.CaptureFixture[str]) -> None:
        self._shell, self._capfd = shell, capfd

    def __call__(self, *words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit, match=str(code)):
            main([*words, "--state-dir", str(self._shell.directory)])
        out, err = self._capfd.readouterr()
        return out if code == 0 else err


def test_a_job_leaves_a_paused_device_and_another_scheduler_knows_of_the_pause(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    run, enough = Terminal(shell, capfd), shell.directory / "enough"
    shell(*UP)
    client, job = shell.client(), shell.submit(enough)
    until(client, job, lambda info: info.state == "running")
    (device,) = until(client, job, lambda info: info.state == "running").devices
    (other,) = {"null:0", "null:1"} - {device}
    assert run("pause", device, "--for", "2h").startswith(f"{device} is paused until ")
    until(client, job, lambda info: info.state == "running" and info.devices == (other,))
    assert f"{device} is paused until" in run("ps")
    assert f"{device} is paused until" in run("migrate", job, "--to", device, code=2)
    shell.kill()
    shell(*UP)
    (paused,) = (one for one in client.status().devices if one.paused)
    assert (paused.name, paused.paused_until_unix_s is not None) == (device, True)
    told = json.loads(run("pause", other, "--json"))
    assert told == {"type": "devices_changed", "devices": [other], "until_unix_s": None, "reservation": None}
    found = until(client, job, lambda info: info.state == "suspended")
    assert found.why is not None
    assert f"{other} is paused (`gpuslice unpause {other}`)" in found.why
    assert "cannot finish" in run("down", "--drain", code=2)
    assert run("unpause", "null:0,null:1") == "null:0-1 are not paused any more\n"
    until(client, job, lambda info: info.state == "running")
    enough.touch()
    ended = client.wait(job, PATIENCE_S)
    assert ended is not None
    assert ended.state == "succeeded"
    said = [line.split("\t")[2] for line in run("events").splitlines()]
    assert {"paused", "unpaused"} <= set(said)


def test_a_job_begins_neither_on_drained_devices_nor_on_those_of_others(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    run, enough = Terminal(shell, capfd), shell.directory / "enough"
    shell(*UP)
    client, old = shell.client(), shell.submit(enough)
    until(client, old, lambda info: info.state == "running")
    assert run("drain") == "null:0-1 are drained: no job begins there\n"
    new = shell.submit(3)
    found = until(client, new, lambda info: info.why is not None and "drained" in info.why)
    assert not found.started
    client.suspend(old)
    until(client, old, lambda info: info.state == "suspended")
    client.resume(old)
    until(client, old, lambda info: info.state == "running")
    assert "there is no device and no node 'b' here" in run("drain", "b", code=2)
    reserved = json.loads(run("reserve", "null:0,null:1", "--end", "2h", "--user", "lab", "--json"))
    assert (reserved["id"], reserved["devices"], reserved["active"]) == ("r1", ["null:0", "null:1"], True)
    assert run("undrain") == "null:0-1 are not drained any more\n"
    found = until(client, old, lambda info: info.state == "suspended")
    assert found.why is not None
    assert "is reserved for lab until" in found.why
    words = ("reserve", "null:1", "--begin", "1h", "--end", "1h")
    assert "null:1 is reserved for lab" in run(*words, "--user", "other", code=2)
    assert [line.split()[0] for line in run("reserve", "--list").splitlines()] == ["ID", "r1"]
    assert run("unreserve", "r1") == "null:0-1 are not reserved any more\n"
    enough.touch()
    for job in (old, new):
        ended = client.wait(job, PATIENCE_S)
        assert ended is not None
        assert ended.state == "succeeded"
