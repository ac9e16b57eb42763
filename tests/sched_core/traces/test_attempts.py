"""Failures and what a rule on retries spares, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.traces.attempts import parse_retries, retried
from gpuslice.sched_core.traces.cells import TraceError
from gpuslice.sched_core.traces.describe import stats, write_csv
from gpuslice.sched_core.traces.formats import read_trace

HEADER = "job_id,num_gpu,submit_time,duration,attempts\n"
ROWS = (
    "syntax,4,0,30,10:user;10:user;10:user\n"
    "node,2,0,100,40:hardware;60:ok\n"
    "both,1,0,60,10:hardware;20:user;30:ok\n"
    "fine,1,0,50,\n"
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("rule", "durations", "jobs", "spared"),
    [
        ("user:0", [10, 100, 30, 50], 2, 4 * 20 + 30),
        ("user:1", [20, 100, 60, 50], 1, 4 * 10),
        ("user:9", [30, 100, 60, 50], 0, 0),
        ("hardware:0", [30, 40, 10, 50], 2, 2 * 60 + 50),
        ("user:0,hardware:0", [10, 40, 10, 50], 3, 4 * 20 + 2 * 60 + 50),
    ],
)
def test_a_job_ends_with_the_first_failure_that_is_not_retried(
    tmp_path: Path, rule: str, durations: list[float], jobs: int, spared: float
) -> None:
    trace = read_trace(write(tmp_path, HEADER + ROWS))
    shorter, found = retried(trace, parse_retries(rule))
    assert shorter.duration_s == durations
    assert (found.jobs, found.device_s) == (jobs, spared)
    assert trace.duration_s == [30, 100, 60, 50]


def test_attempts_survive_writing_clamping_and_units(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, HEADER + ROWS))
    write_csv(trace, tmp_path / "again.csv")
    assert read_trace(tmp_path / "again.csv").attempts == trace.attempts
    minutes = trace.clamped(1).in_units_of(60)
    assert minutes.attempts is not None
    assert minutes.attempts[1] == ((2400, "hardware"), (3600, ""))
    assert stats(trace)["failures"] == {"hardware": 2, "user": 4}


def test_long_and_exact_attempts_survive_writing(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, HEADER + "long,1,0,1234568.1234567,1234567:user;1.1234567:ok\n"))
    write_csv(trace, tmp_path / "again.csv")
    again = read_trace(tmp_path / "again.csv")
    assert again.attempts == trace.attempts == [((1234567, "user"), (1.1234567, ""))]


def test_philly_tells_failures_by_how_the_job_ended(tmp_path: Path) -> None:
    runs = [
        {
            "start_time": f"2017-10-01 00:0{minute}:00",
            "end_time": f"2017-10-01 00:0{minute}:30",
            "detail": [{"ip": "m", "gpus": ["gpu0"]}],
        }
        for minute in range(3)
    ]
    log = [
        {"jobid": name, "status": status, "submitted_time": "2017-10-01 00:00:00", "attempts": runs}
        for name, status in (("a", "Failed"), ("b", "Pass"))
    ]
    trace = read_trace(write(tmp_path, json.dumps(log)))
    persistent, transient = (30, "persistent"), (30, "transient")
    assert trace.attempts == [(persistent,) * 3, (transient, transient, (30, ""))]
    shorter, _ = retried(trace, {"persistent": 0})
    assert shorter.duration_s == [30, 90]


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ("10", "'10' is not SECONDS:CLASS"),
        ("x:user", "could not convert"),
        ("-1:user", "is not SECONDS:CLASS"),
        ("10:user;5:ok", "they take 15 s together, the duration is 30 s"),
    ],
)
def test_malformed_attempts_are_named(tmp_path: Path, cell: str, named: str) -> None:
    with pytest.raises(TraceError, match=f"line 2, column 'attempts': .*{named}"):
        read_trace(write(tmp_path, HEADER + f"a,1,0,30,{cell}\n"))


@pytest.mark.parametrize("rule", ["user", "user:x", ":3", "user:-1", ""])
def test_malformed_rules_are_named(rule: str) -> None:
    with pytest.raises(UsageError, match="--retries"):
        parse_retries(rule)


def test_a_rule_needs_something_to_apply_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no job of trace\.csv failed as 'oom'"):
        retried(read_trace(write(tmp_path, HEADER + ROWS)), {"oom": 0})
    bare = write(tmp_path, "job_id,num_gpu,submit_time,duration\na,1,0,5\n")
    with pytest.raises(UsageError, match="says nothing of attempts"):
        retried(read_trace(bare), {"user": 0})
