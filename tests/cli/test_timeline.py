"""``gpuslice timeline`` of a real run: while the scheduler is up, after it was killed, after it left."""

from __future__ import annotations

import json

from ..patience import PATIENCE_S
from ..profiler import trace_format
from .conftest import Shell
from .waiting import until


def test_the_timeline_of_a_run_from_the_first_moment_to_the_last(shell: Shell) -> None:
    shell.up()
    client = shell.client()
    enough = shell.directory / "enough"
    jobs = [shell.submit(enough), shell.submit(enough)]
    for job in jobs:
        until(client, job, lambda info: info.slices > 1)
    out = shell.directory / "run.json.gz"
    found = json.loads(shell("timeline", "--out", str(out), "--json"))
    assert (found["devices"], found["jobs"], found["path"]) == (1, 2, str(out))
    assert trace_format.spans_of(trace_format.load(out), "devices", "null:0")
    enough.touch()
    for job in jobs:
        assert client.wait(job, PATIENCE_S) is not None
    shell.kill()
    assert "2 jobs on 1 devices" in shell("timeline", "--out", str(out))
    killed = trace_format.load(out)
    shell.up()
    info = {job.id: job for job in client.jobs()}
    shell("down")
    shell("timeline", "--out", str(out))
    events = trace_format.load(out)
    for job in jobs:
        given = [one for one in trace_format.spans_of(events, "devices", "null:0") if one["name"] == job]
        assert len({one["args"]["epoch"] for one in given}) == info[job].slices
        assert trace_format.spans_of(events, "jobs", job) == trace_format.spans_of(killed, "jobs", job)
        assert len(info[job].recent) == min(8, info[job].slices)
        assert info[job].switches <= info[job].slices - 1
    ends = [event["name"] for event in events if event["ph"] == "i"]
    assert ends == ["succeeded", "succeeded"]


def test_a_migration_is_an_arrow(shell: Shell) -> None:
    shell("up", "--devices", "null:2")
    client = shell.client()
    job = shell.submit(10**6, name="nomad")
    until(client, job, lambda info: info.state == "running")
    shell("migrate", job, "--to", "null:1")
    until(client, job, lambda info: info.devices == ("null:1",) and info.state == "running")
    shell("cancel", job)
    client.wait(job, PATIENCE_S)
    out = shell.directory / "run.json.gz"
    assert json.loads(shell("timeline", "--out", str(out), "--json"))["migrations"] == 1
    events = trace_format.load(out)
    names = trace_format.tracks(events)
    ends = [(one["ph"], *names[one["pid"], one["tid"]]) for one in events if one["ph"] in "sf"]
    assert ends == [("s", "devices", "null:0"), ("f", "devices", "null:1")]
    shell("down")


def test_impossible_timelines_are_refused(shell: Shell) -> None:
    assert "there is no journal" in shell("timeline", "--out", "run.json", code=3)
    assert "is no .json" in shell("timeline", "--out", "run.txt", code=2)
    assert "--out is missing" in shell("timeline", code=2)
    shell.up()
    assert "cannot write" in shell("timeline", "--out", str(shell.directory / "no" / "run.json"), code=2)
    shell("down")
