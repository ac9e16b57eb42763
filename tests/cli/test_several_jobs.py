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
            main([words[0], "--state-dir", str(shell.directory), *words[1:]])
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
    assert run("requeue", "b", "--fresh") == ([], "")
    ended = client.wait("b")
    assert ended is not None
    assert (ended.state, ended.restarts) == ("succeeded", 0)
    assert "job b begins anew; removed: nothing" in client.read_log("b", err=True).decode()
    words = ["--", "bash", "-c", "echo {lr} {seed} {x} $GPUSLICE_GRID_LR $GPUSLICE_ARRAY_INDEX"]
    grid = ["--grid", "lr=0.1,0.01", "--grid", "seed=1,2", "--at-once", "1"]
    found, _ = run("submit", "--name", "g", *grid, *words)
    assert found == ["g-0", "g-1", "g-2", "g-3"]
    for name in found:
        assert client.wait(name) is not None
    assert [client.read_log(name) for name in found] == [
        b"0.1 1 {x} 0.1 0\n",
        b"0.1 2 {x} 0.1 1\n",
        b"0.01 1 {x} 0.01 2\n",
        b"0.01 2 {x} 0.01 3\n",
    ]
    assert client.submit_array(["--", "sleep", "{}000"], array="7-9%1", name="h") == ("h-7", "h-8", "h-9")
    for name, said in (("h", "there is an array 'h' already"), ("a", "there is a job 'a-0' already")):
        assert said in run("submit", "--name", name, "--array", "0-5", "--", "true", code=2)[1]
    assert "--at-once is for" in run("submit", "--at-once", "2", "--", "true", code=2)[1]
    assert len(client.jobs()) == 11, "of an array of which one job is refused, none is submitted"
    until(client, "h-7", lambda info: info.started)
    assert run("set", "--job", "h-9", "priority=5", "time-limit=8h", "weight=2") == ([], "")
    (changed,) = [job for job in client.jobs() if job.id == "h-9"]
    assert (changed.priority, changed.time_limit_s, changed.weight) == (5, 28_800.0, 2.0)
    assert "did you mean 'priority'?" in run("set", "--job", "h-9", "priorit=5", code=2)[1]
    whys = {job.id: job.why for job in client.jobs()}
    assert whys["h-8"] == whys["h-9"] == "array h has 1 of 1 jobs at once, for h-7"
    lines = [line.split() for line in run("ps")[0]]
    assert [line[0] for line in lines] == ["JOB", "h", "a-0", "a-1", "a-2", "b", "g"]
    assert lines[1][4:8] == ["0", "of", "3", "ended"]
    assert [line.split()[0] for line in run("ps", "--expand")[0]][1:4] == ["h-7", "h-8", "h-9"]
    found = json.loads(run("history", "--since", "1h", "--json")[0][0])
    assert {one["id"]: one["state"] for one in found["jobs"]} == {j.id: j.state for j in client.jobs()}
    shell.kill()
    assert [line.split()[0] for line in run("ps")[0]] == ["JOB", "h", "a-0", "a-1", "a-2", "b", "g"]
    out, err = run("history")
    assert [line.split("\t")[0] for line in out[:3]] == ["JOB", "a-0", "a-1"]
    assert out[-3:][0].startswith("USER\tJOBS")
    assert "this is from its journal" in err
    shell("up", "--devices", "null:1", "--policy", "fifo", "--prestart", "0")
    assert {job.id: job.why for job in client.jobs()}["h-9"] == "array h has 1 of 1 jobs at once, for h-7"
    shell("down")
