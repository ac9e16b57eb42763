"""What a running scheduler lets people see: its log and its metrics."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from gpuslice.daemon import event_log

from ..patience import PATIENCE_S
from .conftest import Shell


def log(shell: Shell) -> list[dict[str, Any]]:
    text = (shell.directory / event_log.FILE).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def metrics(shell: Shell) -> str:
    url = [line["details"]["url"] for line in log(shell) if line["event"] == "metrics"][-1]
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_the_log_tells_what_happened(shell: Shell) -> None:
    shell.up()
    job = shell.submit(20, 3)
    shell("wait", job, code=3)
    shell("down")
    found = log(shell)
    assert [found[0]["event"], found[-1]["event"]] == ["started", "ended"]
    assert found[0]["details"]["policy"] == "rr"
    states = [line["details"]["to"] for line in found if line["event"] == "state"]
    assert states == ["starting", "running", "failed"]
    failed = next(line for line in found if line["details"].get("to") == "failed")
    assert (failed["job"], failed["details"]["steps"]) == (job, 20)
    assert "exit code 3" in failed["details"]["reason"]
    assert "PATH" not in json.dumps(found), "environments are nobody's business"


def test_metrics_go_on_where_the_last_scheduler_stopped(shell: Shell) -> None:
    shell.up("--metrics-port", "0")
    job = shell.submit(20)
    shell("wait", job)
    before = metrics(shell)
    assert 'gpuslice_jobs_ended_total{state="succeeded"} 1.0' in before
    assert 'gpuslice_build_info{policy="rr",version=' in before
    shell.kill()
    shell.up("--metrics-port", "0")
    assert 'gpuslice_jobs_ended_total{state="succeeded"} 1.0' in metrics(shell)
    assert sum(line["event"] == "submitted" for line in log(shell)) == 1, "the past is not told twice"
    shell("down")


def test_an_impossible_port_is_refused(shell: Shell) -> None:
    assert "--metrics-port" in shell("up", "--devices", "null:1", "--metrics-port", "70000", code=2)
