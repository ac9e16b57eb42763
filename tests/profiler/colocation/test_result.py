"""The result: right for jobs of known truth, and the same figures in JSON, CSV, page and documents."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from gpuslice.profiler.colocation.page import headline, page, verdict_text
from gpuslice.profiler.colocation.plan import Plan
from gpuslice.profiler.colocation.result import Result, make_result, to_csv
from gpuslice.profiler.colocation.stress import LEVELS, Stressed
from gpuslice.profiler.colocation.trial import Trial, measure, measure_turns

from .jobs import SWITCH_S, TURN_S, Job, in_turns, run

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "json.md"
NAMES = ("burn.py <1>", "burn.py <1> #2", "wait.py")
#: The machine drifts: in every round all is slower than in the last one.
DRIFT = (1.0, 1.1, 1.3)
MIB = 1 << 20


def jobs(factor: float) -> Sequence[Job]:
    busy = Job(compute_s=round(0.01 * factor, 3))
    return busy, busy, Job(compute_s=0.0, sleep_s=0.02 * factor)


def experiment(
    last: int | None = None,
    memory_bytes: int | None = None,
    rounds: int = 3,
    *,
    without_slices: bool = False,
    stress: bool = False,
) -> Result:
    plan = Plan(3, 2, rounds, ("bandwidth", "compute") if stress else ())
    trials = []
    for number, members, mode in list(plan.tasks())[:last]:
        these = [jobs(DRIFT[number])[job] for job in members]
        if mode in ("stressed", "reference"):
            load = loads(members[0] == 2 if members else False)
            trials.append(Trial(number, members, mode, 3.5, (), load))
            continue
        if mode == "sliced":
            recordings, cycles = in_turns(these, 2)
            runs = () if without_slices else measure_turns(recordings, cycles)
        else:
            runs = measure(run(these, 3.0))
        runs = tuple(msgspec.structs.replace(one, memory_bytes=100 * MIB) for one in runs)
        trials.append(Trial(number, members, mode, 3.5, runs))
    return make_result(NAMES, "cpu:0", 3.0, TURN_S, plan, trials, memory_bytes)


def loads(waits: bool) -> tuple[Stressed, ...]:
    """Beside a job that only waits nothing happens; beside another one both get their part of the core."""
    return tuple(
        Stressed(kind, level, *((1.0, 1000.0, 1.0) if waits else (max(0.5, 1 - level), 500.0, 0.5)))
        for kind in ("bandwidth", "compute")
        for level in LEVELS
    )


@pytest.fixture(scope="module")
def result() -> Result:
    return experiment()


def test_known_slow_downs_lie_in_their_intervals(result: Result) -> None:
    truth = {
        (NAMES[0], NAMES[1]): ((0.5, 0.5), "pack"),  # a slice costs its switch
        (NAMES[0], NAMES[2]): ((1.0, 1.0), "pack"),
        (NAMES[1], NAMES[2]): ((1.0, 1.0), "pack"),
    }
    packed = {one.members: one for one in result.sets if one.mode == "packed"}
    assert packed.keys() == truth.keys()
    for members, (values, verdict) in truth.items():
        found = packed[members]
        assert found.verdict == verdict
        for value, interval in zip(values, found.interval, strict=True):
            assert interval is not None
            low, high = interval
            assert low - 0.01 <= value <= high + 0.01
            assert high - low < 0.05, "the drift from round to round does not widen it"
        assert found.total == pytest.approx(sum(found.normalized))
        assert found.gain == pytest.approx(found.total * (1 + SWITCH_S / TURN_S), rel=0.02)
        assert found.memory_bytes == 200 * MIB


def test_sliced_sets_are_measured_with_their_switches(result: Result) -> None:
    sliced = [one for one in result.sets if one.mode == "sliced"]
    assert result.sliced == "measured"
    assert [one.measured for one in sliced] == [True] * 3
    share = 0.5 * TURN_S / (TURN_S + SWITCH_S)
    for one in sliced:
        assert one.normalized == pytest.approx((share, share), rel=0.02)
        for interval in one.interval:
            assert interval is not None
            assert interval[0] - 0.01 <= share <= interval[1] + 0.01


def test_sets_that_could_not_be_sliced_are_marked_as_assumed() -> None:
    found = experiment(without_slices=True)
    sliced = [one for one in found.sets if one.mode == "sliced"]
    assert (found.sliced, found.complete) == ("assumed", True)
    assert [(one.measured, one.normalized, one.total) for one in sliced] == [(False, (0.5, 0.5), 1.0)] * 3
    assert [one.verdict for one in sliced] == ["slice", "pack", "pack"]


def test_the_matrix_is_of_the_pairs(result: Result) -> None:
    assert result.matrix is not None
    assert [result.matrix[at][at] for at in range(3)] == [None] * 3
    by_set = {one.members: one.normalized for one in result.sets if one.mode == "packed"}
    assert (result.matrix[0][2], result.matrix[2][0]) == by_set[NAMES[0], NAMES[2]]


def test_json_and_csv_agree(result: Result) -> None:
    found = msgspec.json.decode(msgspec.json.encode(result))
    assert msgspec.convert(found, Result) == result
    expected = []
    for one in found["sets"]:
        for name, value, interval in zip(one["members"], one["normalized"], one["interval"], strict=True):
            low, high = interval or ("", "")
            label = " + ".join(one["members"])
            row = (label, one["mode"], name, value, low, high, one["total"], one["verdict"])
            expected.append([str(cell) for cell in row])
    assert list(csv.reader(io.StringIO(to_csv(result))))[1:] == expected


def test_json_and_page_agree(result: Result) -> None:
    found = msgspec.json.decode(msgspec.json.encode(result))
    text = page(result)
    cells = [float(cell) for cell in re.findall(r'data-normalized="([^"]+)"', text)]
    assert cells == [value for row in found["matrix"] for value in row if value is not None]
    shown = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", text)]
    by_mode = {(tuple(one["members"]), one["mode"]): one for one in found["sets"]}
    for (members, mode), packed in by_mode.items():
        if mode == "sliced":
            continue
        sliced = by_mode[members, "sliced"]
        (row,) = (row for row in shown if row[0] == escape(" + ".join(members)))
        low, high = packed["gain_interval"]
        assert row[1:4] == [packed["verdict"], f"{packed['gain']:.3f}", f"{low:.3f} to {high:.3f}"]
        assert row[4:] == [f"{packed['total']:.3f}", f"{sliced['total']:.3f}"]
        for at, name in enumerate(members):
            (row,) = (
                row for row in shown if row[:2] == [escape(name), escape(members[1 - at])] and len(row) == 6
            )
            assert row[2::2] == [f"{one['normalized'][at]:.3f}" for one in (packed, sliced)]
            (low, high), _ = (one["interval"][at] for one in (packed, sliced))
            assert row[3] == f"{low:.3f} to {high:.3f}"
    for job in found["jobs"]:
        (row,) = (row for row in shown if row[0] == escape(job["name"]) and len(row) == 4)
        assert row[1] == f"{job['steps_per_second']:.4g}"
        assert float(row[3]) * MIB == job["memory_bytes"]


def test_the_page_is_one_file_with_heat_map_distributions_and_timeline(result: Result) -> None:
    text = page(result)
    assert not re.search(r"https?:|src=|href=|@import", text)
    figures = [ElementTree.fromstring(one) for one in re.findall(r"<figure.*?</figure>", text)]
    assert [figure.findtext("h3") for figure in figures] == [
        *(f"Steps of {name} that take at most" for name in NAMES),
        "Timeline",
    ]
    lines = [line.findtext("title") for line in figures[0].iter("polyline")]
    assert lines == ["alone", *(f"{how} {name}" for name in NAMES[1:] for how in ("beside", "in turns with"))]


def test_charts_that_are_compared_have_equal_scales(result: Result) -> None:
    figures = [ElementTree.fromstring(one) for one in re.findall(r"<figure.*?</figure>", page(result))]
    marks = [[(text.get("x"), text.text) for text in figure.iter("text")] for figure in figures[:3]]
    assert marks[0] == marks[1] == marks[2]
    loads = [
        one for one in re.findall(r"<figure.*?</figure>", page(experiment(stress=True))) if "load:" in one
    ]
    assert len({tuple(re.findall(r"<text.*?</text>", one)) for one in loads}) == 1


def test_a_job_has_one_colour_in_all_charts(result: Result) -> None:
    found: dict[str, set[tuple[str | None, str | None]]] = {}
    for one in re.findall(r"<figure.*?</figure>", page(result)):
        for line in ElementTree.fromstring(one).iter("polyline"):
            look = (line.get("stroke"), line.get("stroke-dasharray"))
            found.setdefault(line.findtext("title", ""), set()).add(look)
    assert {len(looks) for looks in found.values()} == {1}
    assert len({look for looks in found.values() for look in looks}) == len(found)


def test_an_interrupted_experiment_tells_what_is_known() -> None:
    found = experiment(last=4)
    assert (found.complete, len(found.jobs)) == (False, 3)
    assert {(one.verdict, one.more_rounds, one.interval) for one in found.sets} == {
        ("undecided", 1, (None, None))
    }
    assert "undecided, about 1 round more" in page(found)
    assert len(found.sets) == 2, "one that ran, and the same in the other mode"
    assert "Interrupted" in page(found)
    nothing = experiment(last=0)
    assert (nothing.jobs, nothing.sets) == ((), ())
    assert "<h1>No jobs were measured together on cpu:0 yet</h1>" in page(nothing)
    assert "<h1>burn.py &lt;1&gt; #2 + wait.py on cpu:0: undecided so far</h1>" in page(found)


def test_the_headline_counts_verdicts_and_says_after_how_many_rounds_it_is_undecided(result: Result) -> None:
    assert headline(result) == "3 sets of jobs on cpu:0: 3 to pack"
    first, *others = result.sets
    open_ = [msgspec.structs.replace(one, verdict="undecided", more_rounds=2) for one in others]
    found = msgspec.structs.replace(
        result, sets=(first, *(one for one in open_ if one.members != first.members))
    )
    assert headline(found) == "3 sets of jobs on cpu:0: 1 to pack, 2 undecided after 3 rounds"
    assert page(found).count("<td>undecided, about 2 rounds more</td>") == 2
    assert verdict_text(msgspec.structs.replace(open_[0], more_rounds=2025)) == "undecided, many rounds more"


def test_sets_that_do_not_fit_are_sliced() -> None:
    alone = experiment(last=3, memory_bytes=150 * MIB)
    assert {(one.mode, one.verdict, one.measured) for one in alone.sets} == {("sliced", "slice", False)}
    assert len(alone.sets) == 3


def test_curves_and_predictions_are_in_the_page() -> None:
    found = experiment(stress=True)
    assert {(one.job, one.pressure) for one in found.stress} == {
        (NAMES[0], 0.5),
        (NAMES[1], 0.5),
        (NAMES[2], 0.0),
    }
    predicted = {one.members: one.normalized for one in found.predictions}
    assert predicted[NAMES[0], NAMES[2]] == pytest.approx((1.0, 1.0))
    assert found.prediction_error is not None
    assert found.prediction_error.pairs == 3
    text = page(found)
    assert f'<td class="number">{found.prediction_error.mean_absolute:.3f}</td>' in text
    for one in found.stress:
        assert f'<td class="number">{one.normalized[-1]:.3f}</td>' in text
    assert "Throughput under load: bandwidth" in text


def test_every_key_is_documented() -> None:
    found = msgspec.json.decode(msgspec.json.encode(experiment(stress=True)))
    text = DOCUMENT.read_text(encoding="utf-8")
    parts = (found, found["jobs"][0], found["sets"][0], found["trials"][0], found["trials"][0]["runs"][0])
    parts += (found["stress"][0], found["predictions"][0], found["prediction_error"])
    parts += tuple(one["stressed"][0] for one in found["trials"] if one["stressed"])[:1]
    assert [key for part in parts for key in part if f"`{key}`" not in text] == []
