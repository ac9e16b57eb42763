"""Pictures of the lab's result: interference, throughput under load, step times, and who trained when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from gpuslice.profiler.axes import Axis, log_axis, short_time, time_axis
from gpuslice.profiler.charts import Line, cumulative, gantt, holders, line_chart, line_key
from gpuslice.profiler.html import COLOURS

from .result import Result
from .stress import LEVELS

#: Moments of the timeline.
_COLUMNS = 800


def heat_map(result: Result) -> str:
    """Return a table of throughput. Row: whose throughput; column: beside which job. Darker is more."""
    assert result.matrix is not None
    names = result.names
    head = "".join(f'<th class="number" title="{escape(name)}">{at}</th>' for at, name in enumerate(names, 1))
    rows = "".join(
        f"<tr><th>{row + 1}&ensp;{escape(names[row])}</th>"
        + "".join(_cell(value, f"{names[row]} beside {names[column]}") for column, value in enumerate(values))
        + "</tr>"
        for row, values in enumerate(result.matrix)
    )
    return (
        "<h2>Interference</h2>"
        "<p class=\"faint\">Normalized throughput of the row's job beside the column's. "
        "1 is its speed alone.</p>"
        f'<div class="scroll"><table class="heat"><thead><tr><th>beside</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(value: float | None, title: str) -> str:
    if value is None:
        return "<td></td>"
    opacity = 0.08 + 0.6 * min(max(value, 0.0), 1.0)
    shade = f"color-mix(in srgb, {COLOURS[0]} {100 * opacity:.0f}%, transparent)"
    return (
        f'<td class="number" style="background:{shade}" data-normalized="{value!r}" '
        f'title="{escape(title)}">{value:.3f}</td>'
    )


def under_loads(result: Result) -> str:
    """Return a chart for each kind of load, all to the same scale."""
    axis = Axis("intensity of the load", 0.0, 1.05, {level: f"{100 * level:g} %" for level in (0.0, *LEVELS)})
    most = max((value for one in result.stress for value in one.normalized), default=1.0)
    marks = {quarter / 4: f"{25 * quarter} %" for quarter in range(int(max(most, 1.0) * 4) + 1)}
    up = Axis("", 0.0, max(most, 1.0), marks)
    charts = []
    for kind in dict.fromkeys(one.kind for one in result.stress):
        lines = [
            Line(
                one.job,
                np.array([0.0, *one.levels]),
                np.array([1.0, *one.normalized]),
                _colour(result, one.job),
            )
            for one in result.stress
            if one.kind == kind
        ]
        chart = line_chart(f"Throughput under load: {kind}", axis, lines, up=up)
        charts.append(f"<div>{chart}{line_key(lines)}</div>")
    return f'<div class="pair">{"".join(charts)}</div>'


def _colour(result: Result, job: str) -> str:
    """Return the colour of a job, the same in all charts."""
    return COLOURS[result.names.index(job) % len(COLOURS)]


_Steps = dict[str, tuple[NDArray[np.float64], str, bool]]


def step_times(result: Result) -> Iterator[str]:
    """Yield a chart of step times for each job that was measured alone, all to the same scale."""
    found = {job: steps for job in range(len(result.names)) if "alone" in (steps := _steps(result, job))}
    if not found:
        return
    medians_s = {job: float(np.median(steps["alone"][0])) for job, steps in found.items()}
    ends = [
        np.quantile(seconds, (0.05, 0.95)) / medians_s[job]
        for job, steps in found.items()
        for seconds, _, _ in steps.values()
    ]
    # The slowest few steps would take up all of the width.
    axis = log_axis(
        "step time, as a multiple of the median alone", np.array([0.5, 2.0, *np.ravel(ends)]), times=False
    )
    charts = []
    for job, steps in found.items():
        lines = [
            cumulative(label, seconds / medians_s[job], colour=colour, dashed=dashed)
            for label, (seconds, colour, dashed) in steps.items()
        ]
        title = f"Steps of {result.names[job]} that take at most"
        note = f"The median alone is {short_time(medians_s[job])}."
        charts.append(f"<div>{line_chart(title, axis, lines, note=note)}{line_key(lines)}</div>")
    yield "<h2>Step times</h2>"
    yield f'<div class="pair">{"".join(charts)}</div>'


def _steps(result: Result, job: int) -> _Steps:
    """Return the job's step times alone and in each set, with the look of their lines.

    Lines have the colour of the job beside it, and are dashed if the jobs took turns.
    """
    found: dict[str, list[float]] = {}
    looks = {"alone": ("currentColor", False)}
    others: list[tuple[int, ...]] = []
    for trial in sorted(result.trials, key=lambda one: (len(one.members), one.members, one.mode)):
        if job not in trial.members or not trial.runs:
            continue
        beside = tuple(other for other in trial.members if other != job)
        if beside not in others:
            others.append(beside)
        how = "in turns with" if trial.mode == "sliced" else "beside"
        label = f"{how} {' + '.join(result.names[other] for other in beside)}" if beside else "alone"
        number = beside[0] if len(beside) == 1 else others.index(beside)
        looks.setdefault(label, (COLOURS[number % len(COLOURS)], trial.mode == "sliced"))
        found.setdefault(label, []).extend(trial.runs[trial.members.index(job)].step_seconds)
    return {label: (np.array(values), *looks[label]) for label, values in found.items() if values}


def timeline(result: Result) -> str:
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
    labels = [_kind(names, members, mode) for members, mode in kinds]
    grid = holders(spans, len(names), _COLUMNS, end_s)
    note = "One colour for each set and mode; hover for its name."
    return gantt("Timeline", time_axis("time", end_s), grid, labels, dict(enumerate(names)), note=note)


def _kind(names: Sequence[str], members: Sequence[int], mode: str) -> str:
    return f"{' + '.join(names[job] for job in members) or 'our own loads'}, {mode}"
