"""Verbs for several jobs at once, against a scheduler."""

from __future__ import annotations

import json

import pytest

from gpuslice.cli import main

from .conftest import Shell
from .waiting import until


def test_globs_choose_jobs_and_what_is_impossible_is_named(
    shell: Shell, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str, code: int = 0) -> tuple[list[str], str]:
        with pytest.raises(SystemExit, match=str(code)):
            main([*words, "--state-dir", str(shell.directory)])
        out, err = capfd.readouterr()
        return out.splitlines(), err

    shell("up", "--devices", "null:1", "--policy", "fifo", "--prestart", "0")
    client = shell.client()
    client.submit(["--", "bash", "-c", "echo one; echo two; echo three; sleep 1000"], name="a-0", tenant="t")
    until(client, "a-0", lambda info: client.read_log("a-0").endswith(b"three\n"))
    for name in ("a-1", "a-2", "b"):
        client.submit(["--", "true"], name=name)
    assert run("logs", "-n", "2", "a-0") == (["two", "three"], "")
    assert run("logs", "-n", "0", "a-0") == ([], "")
    assert "-n 20" in run("logs", "-n", "-1", "a-0", code=2)[1]
    assert [line.split()[0] for line in run("ps", "a-*")[0]] == ["JOB", "a-0", "a-1", "a-2"]
    assert [line.split()[0] for line in run("ps", "--user", "t")[0]] == ["JOB", "a-0"]
    found = json.loads(run("ps", "--user", "-", "--state", "queued", "--json")[0][0])
    assert [job["id"] for job in found["jobs"]] == ["a-1", "a-2", "b"]
    assert run("ps", "c*", code=2) == (
        [],
        "gpuslice: no job matches 'c*'\ngpuslice: `gpuslice ps` lists them\n",
    )
    assert run("suspend", "a-1") == ([], "")
    assert [json.loads(line)["id"] for line in run("suspend", "a-[12]", "b", "--json")[0]] == ["a-2", "b"]
    assert "not possible for a-0" in run("resume", "a-*")[1]
    assert "no job matches 'a-0*'" in run("resume", "a-0*", "--mine", code=2)[1]
    assert run("cancel", "--all") == ([], "")
    assert {job.id: client.wait(job.id) is not None for job in client.jobs()} == dict.fromkeys(
        ("a-0", "a-1", "a-2", "b"), True
    )
    assert "no job is named" in run("cancel", code=2)[1]
    assert "not possible for any job" in run("cancel", "--all", code=2)[1]
    assert not (shell.directory / "logs" / "b.out").exists(), "b was started in the place of a-0"
    shell("down")
