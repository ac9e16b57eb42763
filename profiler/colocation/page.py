"""The lab's result as one HTML file that needs no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from gpuslice.profiler.charts import Axis, Line, gantt, holders, line_chart, short_time, time_axis
from gpuslice.profiler.html import COLOURS, Table, colour_key, document, render_table, round_step, swatch

from .result import Interval, Result, SetResult
from .stress import LEVELS
from .verdict import VerdictName

_MIB = 1 << 20
_COLUMNS = 800
#: Room for a name before the cells of the heat map, and a cell's size, in pixels.
_MARGIN, _WIDTH, _HEIGHT = 240, 96, 40
_SHOWN = 30
#: What the headline says of each verdict.
_VERDICTS: dict[VerdictName, str] = {
    "pack": "to share the device",
    "slice": "to take turns",
    "separate": "in which a job needs a device without the others",
    "undecided": "undecided",
}


def page(result: Result) -> str:
    """Return ``result`` as an HTML page. The JSON has more figures, and all their digits."""
    state = "" if result.complete else " Interrupted: not all was measured."
    lead = [
        f"Co-location on {result.device}, {result.repeats} rounds of {result.seconds:g} s. "
        f"Intervals: {100 * result.confidence:g} %.{state}",
        "Normalized throughput: steps per second together by steps per second alone, in the same trial. "
        f"Sliced: in turns of {result.turn_seconds:g} s; switches count. "
        "Where that was not measured, each member is assumed to get its share.",
    ]
    parts = [
        *([_heat_map(result)] if result.matrix is not None else []),
        *map(render_table, (_sets(result), _jobs(result))),
        *_sensitivity(result),
        *_distributions(result),
        *([_timeline(result)] if result.trials else []),
    ]
    return document(headline(result), lead, parts)


def headline(result: Result) -> str:
    """Return how many sets of jobs have which verdict, in one sentence."""
    verdicts = Counter({one.members: one.verdict for one in result.sets}.values())
    if not verdicts:
        return f"No jobs were measured together on {result.device} yet"
    several = verdicts.total() > 1
    counts = ", ".join(f"{verdicts[name]} {text}" for name, text in _VERDICTS.items() if verdicts[name])
    return f"{verdicts.total()} {'sets' if several else 'set'} of jobs on {result.device}: {counts}"


def interval_text(interval: Interval) -> str:
    """Return ``[low, high]`` as text."""
    return "(no interval yet)" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def verdict_text(one: SetResult) -> str:
    """Return the verdict as text, with the number of rounds that would decide it."""
    if one.verdict != "undecided":
        return one.verdict
    return f"undecided, {one.more_rounds} {'round' if one.more_rounds == 1 else 'rounds'} more"


def _sets(result: Result) -> Table:
    rows = [
        (
            name,
            " + ".join(one.members),
            one.mode if one.measured else f"{one.mode}, assumed",
            f"{value:.6g}",
            _interval(interval),
            f"{one.total:.6g}",
            _interval(one.total_interval),
            "" if one.gain is None else f"{one.gain:.6g}",
            verdict_text(one),
        )
        for one in result.sets
        for name, value, interval in zip(one.members, one.normalized, one.interval, strict=True)
    ]
    header = ("job", "set", "mode", "normalized", "interval", "total", "interval of total", "gain", "verdict")
    return Table("Sets", header, rows)


def _jobs(result: Result) -> Table:
    rows = [
        (
            job.name,
            f"{job.steps_per_second:.6g}",
            _interval(job.interval),
            "not told" if job.memory_bytes is None else f"{job.memory_bytes / _MIB:.1f}",
        )
        for job in result.jobs
    ]
    return Table("Jobs alone", ("job", "steps/s", "interval", "memory, MiB"), rows)


def _interval(interval: Interval) -> str:
    return "" if interval is None else f"{interval[0]:.4g} to {interval[1]:.4g}"


def _sensitivity(result: Result) -> Iterator[str]:
    """Yield the parts about our own loads: their effect on each job, and predictions for pairs."""
    if not result.stress:
        return
    rows = [
        (one.job, one.kind, f"{one.pressure:.6g}", *(f"{value:.6g}" for value in one.normalized))
        for one in result.stress
    ]
    levels = [f"at {100 * level:g} %" for level in LEVELS]
    yield render_table(Table("Throughput under our own loads", ("job", "load", "pressure", *levels), rows))
    axis = Axis("intensity of the load", 0.0, 1.05, {level: f"{100 * level:g} %" for level in (0.0, *LEVELS)})
    for kind in dict.fromkeys(one.kind for one in result.stress):
        known = [one for one in result.stress if one.kind == kind]
        lines = [
            Line(one.job, np.array([0.0, *one.levels]), np.array([1.0, *one.normalized])) for one in known
        ]
        yield line_chart(f"Throughput under load: {kind}", axis, lines, width=1100) + _key(lines)
    if result.predictions:
        yield render_table(_predictions(result))
    off = result.prediction_error
    if off is not None:
        of_mean = "" if off.mean_absolute_of_mean is None else f"{off.mean_absolute_of_mean:.6g}"
        header = ("pairs held out", "mean error", "greatest", "mean error of the mean of other pairs")
        row = (str(off.pairs), f"{off.mean_absolute:.6g}", f"{off.greatest:.6g}", of_mean)
        yield render_table(Table("Error of the predictions", header, [row]))


def _predictions(result: Result) -> Table:
    rows = [
        (
            name,
            " + ".join(pair.members),
            f"{pair.normalized[at]:.6g}",
            "" if pair.measured is None else f"{pair.measured[at]:.6g}",
        )
        for pair in result.predictions
        for at, name in enumerate(pair.members)
    ]
    return Table("Predicted without having seen the pair", ("job", "set", "predicted", "measured"), rows)


def _heat_map(result: Result) -> str:
    """Return a heat map of throughput. Row: whose throughput; column: beside which job. Darker is more."""
    assert result.matrix is not None
    names = result.names
    cells = [
        part
        for row, values in enumerate(result.matrix)
        for column, value in enumerate(values)
        for part in _cell(row, column, value, f"{names[row]} beside {names[column]}")
    ]
    for index, name in enumerate(names):
        across, down = _MARGIN + (index + 0.5) * _WIDTH, _HEIGHT * (index + 1.5) + 5
        cells.append(f'<text x="{_MARGIN - 8}" y="{down:g}" text-anchor="end">{_short(name)}</text>')
        cells.append(
            f'<text x="{across:g}" y="26" text-anchor="middle">{index + 1}'
            f"<title>{escape(name)}</title></text>"
        )
        cells.append(f'<text x="8" y="{down:g}">{index + 1}</text>')
    width, height = _MARGIN + len(names) * _WIDTH + 8, (len(names) + 1) * _HEIGHT + 8
    title = "Interference: normalized throughput of the row's job beside the column's"
    label = f'viewBox="0 0 {width} {height}" role="img" aria-label="{title}"'
    style = f'style="max-width:{width}px"'
    return f'<h2>{title}</h2><figure class="heat"><svg {label} {style}>{"".join(cells)}</svg></figure>'


def _cell(row: int, column: int, value: float | None, title: str) -> Iterator[str]:
    x, y = _MARGIN + column * _WIDTH, (row + 1) * _HEIGHT
    if value is None:
        yield f'<rect class="row" x="{x}" y="{y}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}"/>'
        return
    opacity = 0.08 + 0.6 * min(max(value, 0.0), 1.0)
    yield (
        f'<rect x="{x}" y="{y}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" fill="{COLOURS[0]}" '
        f'fill-opacity="{opacity:.3f}" data-normalized="{value!r}"><title>{escape(title)}: {value:.6g}'
        "</title></rect>"
    )
    yield f'<text x="{x + _WIDTH / 2 - 1:g}" y="{y + 24}" text-anchor="middle">{value:.3f}</text>'


def _distributions(result: Result) -> Iterator[str]:
    """Yield for each job a chart of its step times, alone and in each set."""
    names = result.names
    for job, name in enumerate(names):
        found: dict[str, list[float]] = {}
        for trial in sorted(result.trials, key=lambda one: len(one.members)):
            if job in trial.members and trial.runs:
                beside = [names[other] for other in trial.members if other != job]
                how = "in turns with" if trial.mode == "sliced" else "beside"
                label = f"{how} {' + '.join(beside)}" if beside else "alone"
                found.setdefault(label, []).extend(trial.runs[trial.members.index(job)].step_seconds)
        known = {label: np.sort(values) for label, values in found.items() if values}
        if known:
            yield _distribution(name, known)


def _distribution(name: str, found: dict[str, np.typing.NDArray[np.float64]]) -> str:
    # The slowest few steps would take up all of the width.
    high_s = 1.2 * max(float(np.quantile(values, 0.95)) for values in found.values())
    mark_s = round_step(high_s / 8)
    marks = {i * mark_s: short_time(i * mark_s) for i in range(int(high_s / mark_s) + 1)}
    lines = [Line(label, values, np.linspace(0, 1, values.size)) for label, values in found.items()]
    chart = line_chart(f"Step times of {name}", Axis("step time", 0.0, high_s, marks), lines, width=1100)
    return chart + _key(lines)


def _key(lines: Sequence[Line]) -> str:
    return colour_key((swatch(COLOURS[index % len(COLOURS)]), line.name) for index, line in enumerate(lines))


def _timeline(result: Result) -> str:
    """Return a chart of when each job ran, without the pauses of an interrupted experiment."""
    kinds = sorted(
        {(trial.members, trial.mode) for trial in result.trials}, key=lambda kind: (len(kind[0]), kind)
    )
    names = result.names
    spans, end_s = [], 0.0
    for trial in result.trials:
        number = kinds.index((trial.members, trial.mode))
        spans.append((number, end_s, end_s + trial.wall_s, trial.members))
        end_s += trial.wall_s
    labels = [
        f"{' + '.join(names[job] for job in members) or 'our own loads'}, {mode}" for members, mode in kinds
    ]
    grid = holders(spans, len(names), _COLUMNS, end_s)
    return gantt("Timeline", time_axis("time", end_s), grid, labels, ("1", str(len(names))))


def _short(name: str) -> str:
    return escape(name if len(name) <= _SHOWN else f"{name[: _SHOWN - 1]}…")
