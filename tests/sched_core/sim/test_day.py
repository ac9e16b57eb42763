"""Conditions of jobs and closed devices in simulations; and a drawn week of a box."""

from __future__ import annotations

from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import NamedTuple

import pytest

from gpuslice.cli import main
from gpuslice.errors import UsageError
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.sim.day import Day
from gpuslice.sched_core.sim.engine import Simulation
from gpuslice.sched_core.sim.outcome import Outcome
from gpuslice.sched_core.sim.run import Request, run_one
from gpuslice.sched_core.traces.day import Window, read_windows
from gpuslice.sched_core.traces.describe import write_csv
from gpuslice.sched_core.traces.formats import read_trace
from gpuslice.sched_core.traces.trace import Trace

from ..world.draws import Draws
from ..world.week import draw_week
from ..world.windows import UNIX_S

_HEADER = "job_id,num_gpu,submit_time,duration,"
#: Policies whose results do not depend on what only one of the engines knows, or measures.
_EQUAL = (
    *("fifo", "fjf", "smallest", "sjf", "srtf", "srsf", "las", "rr"),
    *("2das", "yarn-cs", "drf", "tetris", "chronus", "themis"),
)


def _read(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_trace(path)


def _run(trace: Trace, policy: str = "fjf", devices: int = 1, windows: tuple[Window, ...] = ()) -> Outcome:
    return run_one(Request(trace, f"1x{devices}", policy, keep_spans=True, windows=windows))


def _times(outcome: Outcome) -> list[tuple[float, float]]:
    return list(zip(outcome.first_start_s.tolist(), outcome.finish_s.tolist(), strict=True))


@pytest.mark.parametrize(
    ("columns", "rows", "times"),
    [
        ("begin", ("50", ""), [(50, 60), (0, 10)]),
        ("hold_until", ("50", "0"), [(50, 60), (0, 10)]),
        ("priority", ("-1", "2"), [(0, 20), (0, 10)]),
        ("after", ("", "a:any"), [(0, 10), (10, 20)]),
        ("array,at_once", ("x,1", "x,1"), [(0, 10), (10, 20)]),
        ("time_limit", ("4", ""), [(0, 4), (4, 14)]),
    ],
)
def test_each_column_is_kept_to(
    columns: str, rows: tuple[str, str], times: list[tuple[float, float]], tmp_path: Path
) -> None:
    text = f"{_HEADER}{columns}\na,1,0,10,{rows[0]}\nb,1,0,10,{rows[1]}\n"
    trace = _read(tmp_path, text)
    assert trace.has_conditions
    assert _times(_run(trace, "rr", devices=2 if columns[0] == "a" else 1)) == times
    write_csv(trace, tmp_path / "again.csv")
    again = read_trace(tmp_path / "again.csv")
    assert (again.extras, again.hold_until_s) == (trace.extras, trace.hold_until_s)


def test_a_job_whose_dependency_cannot_come_true_never_runs(tmp_path: Path) -> None:
    rows = ["a,1,0,10,5,,x", "b,1,1,10,,x:ok,", "c,1,1,10,,a:failed,", "d,1,1,10,,b:any;c,"]
    text = "\n".join([f"{_HEADER}time_limit,after,array", *rows, ""])
    outcome = _run(_read(tmp_path, text))
    assert outcome.stopped.tolist() == [True, True, False, False]
    assert isnan(outcome.first_start_s[1])
    assert outcome.finish_s.tolist() == [5, 5, 15, 25]


@pytest.mark.parametrize(
    ("window", "times"),
    [
        (Window("reserve", (0,), 5, 20, "v"), [(0, 25), (5, 15)]),
        (Window("reserve", (0,), 5, 20, "w"), [(0, 25), (25, 35)]),
        (Window("pause", (0,), 5, 20, ""), [(0, 25), (25, 35)]),
        (Window("drain", (0,), 5, 20, ""), [(0, 10), (20, 30)]),
    ],
)
def test_each_kind_of_window_is_kept_to(window: Window, times: list[tuple[float, float]]) -> None:
    trace = Trace(["a", "b"], [0, 1], [1, 1], [10, 10], {"tenant": ["u", "v"]})
    assert _times(_run(trace, windows=(window,))) == times


@pytest.mark.parametrize("policy", _EQUAL)
def test_where_nothing_of_a_day_is_used_it_is_the_engine(policy: str) -> None:
    draws = Draws(_EQUAL.index(policy))
    columns = [
        (
            draws.between(0.0, 6000.0, job, "submit"),
            draws.choice([1, 1, 2, 4], job, "devices"),
            draws.between(60.0, 3600.0, job, "s"),
        )
        for job in range(12)
    ]
    submit_s, demand, duration_s = zip(*columns, strict=True)
    trace = Trace([f"j{number}" for number in range(12)], submit_s, demand, duration_s)
    options = {"quantum_s": 600.0} if policy in ("las", "rr") else {}
    kinds: tuple[type[Simulation], ...] = (Simulation, Day)
    engine, day = (kind(trace, Cluster([4]), make_policy(policy, options)).run() for kind in kinds)
    assert day.finish_s.tolist() == engine.finish_s.tolist()
    assert day.executed_s.tolist() == pytest.approx(engine.executed_s.tolist())


@pytest.mark.parametrize(
    ("columns", "cells", "named"),
    [
        ("begin", "-1", "column 'begin': -1 is not a time"),
        ("hold_until", "nan", "column 'hold_until': nan is not a time"),
        ("time_limit", "6h", "column 'time_limit': '6h' is not a number"),
        ("priority", "high", "column 'priority': 'high' is not a number"),
        ("priority", "1.5", "column 'priority': 1.5 is not a whole number"),
        ("after", "a:done", "column 'after': 'a:done' is no dependency"),
        ("after", "z", "job 'b' is to start after 'z', which is not submitted before it"),
        ("after", "b", "job 'b' is to start after 'b', which is not submitted before it"),
        ("after", "c", "job 'b' is to start after 'c', which is not submitted before it"),
        ("array,after", "x,x", "job 'b' is to start after 'x', which is not submitted before it"),
        ("at_once", "2", "column 'at_once': the job is of no array"),
    ],
)
def test_wrong_conditions_are_named(columns: str, cells: str, named: str, tmp_path: Path) -> None:
    empty = "," * columns.count(",")
    with pytest.raises(UsageError, match=named):
        _read(tmp_path, f"{_HEADER}{columns}\na,1,0,9,{empty}\nb,1,1,9,{cells}\nc,1,1,9,{empty}\n")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["close,0,1,2,"], "line 2, column 'what': 'close' is not known"),
        (["pause,2,1,2,"], "line 2, column 'devices': there is no device '2'"),
        (["pause,,1,2,"], "line 2, column 'devices': nothing there"),
        (["pause,0,2,2,"], "line 2, column 'end': 2 is not after the begin at 2"),
        (["pause,0,x,2,"], "line 2, column 'begin': 'x' is not a number"),
        (["reserve,0,1,2,"], "line 2, column 'user': nothing there"),
        (["drain,0,1,2,u"], "line 2, column 'user': drain is for nobody"),
        (["pause,0 1,1,9,", "pause,1,5,9,"], "two windows pause device 1: from 1 to 9 and from 5 to 9"),
        (["reserve,0,1,9,u", "reserve,0,5,9,v"], "two windows reserve device 0"),
    ],
)
def test_wrong_windows_are_named(rows: list[str], named: str, tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    path.write_text("\n".join(["what,devices,begin,end,user", *rows, ""]))
    with pytest.raises(UsageError, match=named):
        read_windows(path, 2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--cluster", "2x1"), "a --cluster of several nodes, racks or sockets"),
        (("--cluster", "1x2/2"), "a --cluster of several nodes, racks or sockets"),
        (("--cluster", "1x2", "--cost", "fixed:5s"), "with --cost fixed:5s"),
        (("--cluster", "1x2", "--policy", "slaq"), "with --policy slaq"),
        (("--cluster", "1x2", "--policy", "gandiva"), "with gandiva with packing, growing, migration"),
        (("--cluster", "1x2", "--set", "pack=true"), "with --set pack=true"),
        (("--cluster", "1x2", "--engine", "compiled"), "with --engine compiled"),
        (("--cluster", "1x2", "--peer", "tiresias:fifo/count"), "with --peer"),
    ],
)
def test_what_cannot_be_simulated_besides_is_refused(
    words: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, windows = tmp_path / "trace.csv", tmp_path / "windows.csv"
    trace.write_text("job_id,num_gpu,submit_time,duration\na,1,0,9\n")
    windows.write_text("what,devices,begin,end\npause,0,5,9\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["sim", str(trace), "--windows", str(windows), *words])
    assert named in capsys.readouterr().err


def test_the_command_takes_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, windows, out = tmp_path / "trace.csv", tmp_path / "windows.csv", tmp_path / "out.csv"
    trace.write_text("job_id,num_gpu,submit_time,duration\na,1,0,9\n")
    windows.write_text("what,devices,begin,end\npause,0,5,9\n")
    words = ["sim", str(trace), "--cluster", "1x1", "--windows", str(windows), "--per-job", str(out)]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(words)
    assert out.read_text().splitlines()[1].startswith("a,0,0,13,1,")
    windows.write_text("what,devices,begin,end\npause,7,5,9\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words)
    assert "there is no device '7'" in capsys.readouterr().err


class _Week(NamedTuple):
    """A drawn week as a trace on one node, with its windows."""

    trace: Trace
    windows: tuple[Window, ...]
    devices: int


def _week(seed: int) -> _Week:
    """Return the jobs, conditions and windows of a short week."""
    scenario = draw_week(seed, days=2, people=8)
    plans = sorted(scenario.jobs, key=lambda plan: plan.spec.submit_s)
    released_s = {wish.job: wish.when_s for wish in scenario.wishes if wish.what == "release"}
    specs = [plan.spec for plan in plans]
    names = [str(device) for device in scenario.devices]
    extras = {
        field: [getattr(spec, field) for spec in specs]
        for field in ("tenant", "after", "time_limit_s", "priority", "array", "at_once")
    }
    extras["begin_unix_s"] = [max(0.0, spec.begin_unix_s - UNIX_S) for spec in specs]
    windows = list[Window]()
    for one in scenario.windows:
        user = one.tenant if one.what == "reserve" else ""
        devices = tuple(map(names.index, one.devices))
        others = [other for other in windows if other.what == one.what and {*other.devices} & {*devices}]
        if all(other.end_s <= one.when_s or one.when_s + one.for_s <= other.begin_s for other in others):
            windows.append(Window(one.what, devices, one.when_s, one.when_s + one.for_s, user))
    trace = Trace(
        [spec.id for spec in specs],
        [spec.submit_s for spec in specs],
        [spec.devices for spec in specs],
        [plan.boundaries * plan.step_s for plan in plans],
        extras,
        hold_until_s=[released_s[spec.id] if spec.hold else 0.0 for spec in specs],
    )
    return _Week(trace, tuple(windows), len(names))


@pytest.mark.parametrize(("seed", "policy"), [(1, "fjf"), (2, "rr"), (3, "2das"), (4, "srtf")])
def test_the_rules_of_a_week_hold(seed: int, policy: str) -> None:
    week = _week(seed)
    options = {"quantum_s": 3600.0} if policy == "rr" else {}
    day = Day(
        week.trace,
        Cluster([week.devices]),
        make_policy(policy, options),
        keep_spans=True,
        windows=week.windows,
    )
    outcome = day.run()
    assert not any(map(isnan, outcome.finish_s))
    _check_work(outcome)
    _check_starts(outcome)
    _check_windows(outcome, week.windows)
    _check_places(outcome)
    if policy in ("rr", "srtf"):
        _check_priorities(outcome, week)


def _check_work(outcome: Outcome) -> None:
    """Each job that has begun has done its work, or has had its time."""
    trace = outcome.trace
    for job, limit_s in enumerate(trace.extras["time_limit_s"]):
        work_s = trace.duration_s[job]
        if not isnan(outcome.first_start_s[job]):
            assert outcome.executed_s[job] == pytest.approx(min(work_s, limit_s or work_s), abs=0.01)
            assert outcome.stopped[job] == (0 < limit_s < work_s)


def _check_starts(outcome: Outcome) -> None:
    """No job begins before its moment, its release and the ends of others; none is cancelled for nothing."""
    trace, number = outcome.trace, {name: job for job, name in enumerate(outcome.trace.ids)}
    assert trace.hold_until_s is not None
    for job, dependencies in enumerate(trace.extras["after"]):
        start_s = outcome.first_start_s[job]
        allowed = list[bool]()
        for other, _, how in (one.partition(":") for one in dependencies):
            before = number[other]
            failed = bool(outcome.stopped[before]) and not isnan(outcome.first_start_s[before])
            allowed.append(how == "any" or (failed if how == "failed" else not outcome.stopped[before]))
            assert isnan(start_s) or outcome.finish_s[before] <= start_s
        assert all(allowed) != isnan(start_s)
        least_s = max(trace.submit_s[job], trace.extras["begin_unix_s"][job], trace.hold_until_s[job])
        assert isnan(start_s) or start_s >= least_s - 0.01


def _check_windows(outcome: Outcome, windows: tuple[Window, ...]) -> None:
    """Nobody is on a device that is closed to him."""
    last: dict[int, tuple[int, ...]] = {}
    for span in sorted(outcome.spans, key=lambda span: span.start_s):
        before, last[span.job] = last.get(span.job, ()), span.devices
        for window in windows:
            hit = {*span.devices} & {*window.devices}
            if window.what == "drain":
                begins = window.begin_s <= span.start_s < window.end_s - 0.01
                assert not (begins and hit.difference(before))
            elif hit and outcome.trace.extras["tenant"][span.job] != (window.user or None):
                assert span.end_s <= window.begin_s + 0.01 or span.start_s >= window.end_s - 0.01


def _check_places(outcome: Outcome) -> None:
    """No device is held twice, and no array has more jobs at once than it may."""
    held: dict[object, list[tuple[float, int]]] = {}
    most: dict[object, int] = {}
    for span in outcome.spans:
        array, at_once = (outcome.trace.extras[field][span.job] for field in ("array", "at_once"))
        for key in (*span.devices, *([array] if at_once else [])):
            most[key] = at_once if isinstance(key, str) else 1
            held.setdefault(key, []).extend([(span.start_s, 1), (span.end_s, -1)])
    for key, changes in held.items():
        count = 0
        for _, change in sorted(changes):
            count += change
            assert count <= most[key]


def _check_priorities(outcome: Outcome, week: _Week) -> None:
    """While a job of one device waits, nobody of lower priority has a device that is open to it."""
    trace, spans = outcome.trace, list(outcome.spans)
    tenant, priority = trace.extras["tenant"], trace.extras["priority"]
    seen = 0
    for job in range(len(trace)):
        own = sorted((span.start_s, span.end_s) for span in spans if span.job == job)
        if trace.demand[job] > 1 or trace.extras["at_once"][job] or not own:
            continue
        for (_, from_s), (until_s, _) in pairwise(own):
            for other in spans:
                begin_s, end_s = max(from_s, other.start_s), min(until_s, other.end_s)
                if end_s - begin_s < 0.01 or priority[other.job] >= priority[job]:
                    continue
                closed = {
                    device
                    for window in week.windows
                    if window.begin_s < end_s and begin_s < window.end_s and window.user != tenant[job]
                    for device in window.devices
                }
                seen += 1
                assert closed.issuperset(other.devices)
    assert seen >= 0
