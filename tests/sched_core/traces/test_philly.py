"""Philly's log: times of a clock with daylight saving, and which jobs are left out."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.cli.trace import convert
from gpuslice.errors import UsageError
from gpuslice.sched_core.traces.cells import TraceError
from gpuslice.sched_core.traces.formats import read_trace
from gpuslice.sched_core.traces.trace import Trace

#: Noon of the first day and midnight of the last around the end of daylight saving time of 2017, in UTC.
AUTUMN_S, AFTER_S = 1_509_735_600, 1_510_041_600
#: From 01:00 of summer to 02:00 of winter, in UTC: what the clock showed twice.
TWICE_S = range(1_509_868_800, 1_509_876_000)
ZONE = ZoneInfo("America/Los_Angeles")


def run(start: str | None, end: str | None, gpus: int = 1) -> dict[str, object]:
    detail = [{"ip": "m1", "gpus": [f"gpu{i}" for i in range(gpus)]}]
    return {"start_time": start, "end_time": end, "detail": detail}


def job(
    name: str, *attempts: dict[str, object], status: str = "Pass", submitted: str = "2017-11-04 00:00:00"
) -> dict[str, object]:
    return {"jobid": name, "vc": "a", "status": status, "submitted_time": submitted, "attempts": [*attempts]}


def read(tmp_path: Path, *jobs: dict[str, object]) -> Trace:
    path = tmp_path / "log.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    return read_trace(path)


PLAIN = job("plain", run("2017-11-04 00:10:00", "2017-11-04 00:30:00", gpus=2))


def test_jobs_that_cannot_be_used_are_left_out_and_counted_by_cause(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        PLAIN,
        job("never"),
        job("not-started", run(None, None)),
        job("text-none", run("None", "None")),
        job("open", run("2017-11-04 00:40:00", "None")),
        job(
            "open-later", run("2017-11-04 00:40:00", "2017-11-04 00:50:00"), run("2017-11-04 01:00:00", None)
        ),
        job("backwards", run("2017-11-04 00:40:00", "2017-11-04 00:39:59")),
        job("no-gpu", run("2017-11-04 00:40:00", "2017-11-04 00:41:00", gpus=0)),
    )
    assert (found.ids, found.demand, found.duration_s) == (["plain"], [2], [1200.0])
    assert found.left_out == {
        "never ran": 3,
        "has an attempt that has not ended": 2,
        "has an attempt that ends before it starts": 1,
        "had no GPU in its last attempt": 1,
    }
    assert found.omissions.startswith("3 left out: never ran, 2 left out: has an attempt that has not ended")
    assert found.clamped(1).left_out == found.left_out


def test_a_log_without_any_usable_job_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no jobs: 1 left out: never ran"):
        read(tmp_path, job("never"))


@pytest.mark.parametrize(
    ("start", "end", "took_s"),
    [
        ("2017-11-05 00:10:00", "2017-11-05 00:30:00", 1200),
        ("2017-11-05 01:50:00", "2017-11-05 01:10:00", 1200),  # the hour that came twice
        ("2017-11-05 00:30:00", "2017-11-05 02:30:00", 3 * 3600),
        ("2017-11-05 01:10:00 PDT", "2017-11-05 01:10:00 PST", 3600),
        ("2018-03-11 01:30:00", "2018-03-11 03:30:00", 3600),  # the hour that was left out
    ],
)
def test_attempts_across_a_change_of_daylight_saving_time(
    tmp_path: Path, start: str, end: str, took_s: int
) -> None:
    assert read(tmp_path, PLAIN, job("b", run(start, end))).duration_s[1] == took_s


@given(st.lists(st.integers(AUTUMN_S, AFTER_S).filter(lambda s: s not in TWICE_S), min_size=3, max_size=3))
def test_moments_that_the_clock_shows_only_once_are_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, moments: list[int]
) -> None:
    moments.sort()
    submitted, start, end = (
        datetime.fromtimestamp(moment, UTC).astimezone(ZONE).strftime("%Y-%m-%d %H:%M:%S")
        for moment in moments
    )
    found = read(tmp_path_factory.mktemp("log"), job("a", run(start, end), submitted=submitted))
    assert found.duration_s == [moments[2] - moments[1]]


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (
            job("b", {"start_time": "2017-11-05 00:10:00", "end_time": "2017-11-05 00:20:00"}),
            "job 1 has no 'detail'",
        ),
        (job("b", run("yesterday", "2017-11-05 00:20:00")), "job 1: time data 'yesterday'"),
        (job("b", run("2017-11-05 00:10:00 PXT", "2017-11-05 00:20:00")), "job 1: .* is no time of the zone"),
        ({"jobid": "b"}, "job 1 has no 'attempts'"),
    ],
)
def test_a_malformed_job_is_named(tmp_path: Path, broken: dict[str, object], named: str) -> None:
    with pytest.raises(TraceError, match=named):
        read(tmp_path, PLAIN, broken)


def test_commands_say_how_many_jobs_were_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps([PLAIN, job("never")]), encoding="utf-8")
    convert(path, tmp_path / "out.csv")
    assert capsys.readouterr().err == f"gpuslice: {path}: 1 left out: never ran\n"
