"""Simulated policies side by side as one HTML page: numbers, distributions, cluster use, who ran where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from gpuslice.profiler.axes import common_unit, duration, log_axis, number_text, time_axis
from gpuslice.profiler.charts import Line, cumulative, gantt, holders, line_chart, line_swatch
from gpuslice.profiler.html import Good, Table, document, render_table
from gpuslice.sched_core.sim.metrics import finish_time_fairness, summary
from gpuslice.sched_core.sim.outcome import Outcome

#: Moments at which the use of the cluster is looked at.
_MOMENTS = 480
#: Devices shown in a picture of who ran where; of a larger cluster every so many-th.
_ROWS = 64
#: The pictures of all policies together, in bytes.
_PICTURES_BYTES = 1_400_000

#: A click on a policy in the key hides or shows its lines.
_SCRIPT = """
for (const button of document.querySelectorAll('button[data-of]')) button.onclick = () => {
  const off = button.classList.toggle('off');
  button.setAttribute('aria-pressed', !off);
  for (const line of document.querySelectorAll(`.line[data-of="${button.dataset.of}"]`))
    line.style.display = off ? 'none' : '';
};
"""

Cell = Callable[[dict[str, Any]], float | None]
Format = Callable[[float], str]
_COUNT: Format = lambda value: f"{value:,.0f}"  # noqa: E731
_PER_CENT: Format = lambda value: f"{100 * value:.1f}"  # noqa: E731
_TWO: Format = lambda value: f"{value:,.2f}"  # noqa: E731


def _part(key: str, part: str) -> Cell:
    return lambda found: (found[key] or {}).get(part)


#: Header, value, how it is written (None: as a time in the table's unit), and whether less (-1) or more (1)
#: is better; 0 if neither.
_Column = tuple[str, Cell, Format | None, int]
_TABLES: dict[str, tuple[_Column, ...]] = {
    "Job completion time (JCT)": (
        ("jobs done", lambda found: found["jobs_done"], _COUNT, 0),
        ("mean", _part("jct_s", "mean"), None, -1),
        ("median", _part("jct_s", "median"), None, -1),
        ("p95", _part("jct_s", "p95"), None, -1),
        ("p99", _part("jct_s", "p99"), None, -1),
        ("makespan", lambda found: found["makespan_s"], None, -1),
        ("deadlines missed", lambda found: found["deadline_misses"], _COUNT, -1),
    ),
    "Waiting and switching": (
        ("to first start", _part("first_start_s", "mean"), None, -1),
        ("for a share", _part("queueing_fair_share_s", "mean"), None, -1),
        ("for a place", _part("queueing_fragmentation_s", "mean"), None, -1),
        ("preemptions", lambda found: found["preemptions"], _COUNT, 0),
        ("migrations", lambda found: found["migrations"], _COUNT, 0),
        ("lost device time", lambda found: found["lost_device_s"], None, 0),
    ),
    "Use and fairness": (
        ("used, %", lambda found: found["utilization"], _PER_CENT, 1),
        ("max ρ", _part("rho", "max"), _TWO, -1),
        ("mean ρ", _part("rho", "mean"), _TWO, -1),
        ("Jain", lambda found: found["jain"], _TWO, 1),
    ),
}
_NOTES = {
    "Job completion time (JCT)": "From submission to completion, of the jobs that ended by themselves.",
    "Waiting and switching": "Mean times of a job; lost device time is that of all jobs together.",
    "Use and fairness": "ρ is finish-time fairness: 1 is what a fair share of the cluster would have given, "
    "more is worse.",
}


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the HTML page of one simulation under each policy.

    Parameters
    ----------
    outcomes
        Of the same trace on the same cluster, with spans.
    """
    first = outcomes[0]
    submitted_s = np.array(first.trace.submit_s)
    start_s = float(submitted_s.min())
    end_s = max([span.end_s for outcome in outcomes for span in outcome.spans], default=start_s) - start_s
    names = [outcome.policy for outcome in outcomes]
    lead = [
        f"{', '.join(names)} on {first.trace.name}: {len(first.trace):,} jobs, {first.devices:,} devices "
        f"({first.cluster}), {duration(end_s)}."
    ]
    if not all(outcome.complete for outcome in outcomes):
        lead.append("The run was interrupted; these are the results so far.")
    parts = [
        *(render_table(table) for table in _tables(outcomes)),
        "<h2>Distributions and use</h2>",
        _key([Line(name, np.empty(0), np.empty(0)) for name in names]),
        f'<div class="pair">{_distributions(outcomes)}</div>',
        _use(outcomes, start_s, end_s),
        "<h2>Who ran where</h2>",
        *_gantts(outcomes, start_s, end_s),
    ]
    return document(headline(outcomes), lead, parts, _SCRIPT)


def headline(outcomes: Sequence[Outcome]) -> str:
    """Return which policy has the shortest mean completion time, in one sentence.

    Means of different jobs do not compare: a policy that has not completed its long jobs yet would look best.
    """
    means_s = {one.policy: spread["mean"] for one in outcomes if (spread := summary(one)["jct_s"])}
    if not means_s:
        return f"No job has ended under {', '.join(one.policy for one in outcomes)}"
    so_far = "" if all(one.complete for one in outcomes) else " so far"
    if len(outcomes) == 1:
        return f"{outcomes[0].policy} completes a job in {duration(*means_s.values())} on average{so_far}"
    if not _comparable(outcomes):
        done = ", ".join(f"{int(_done(one).sum()):,} under {one.policy}" for one in outcomes)
        return f"Different jobs have ended: {done}; their mean times do not compare"
    texts = {name: duration(mean_s) for name, mean_s in sorted(means_s.items(), key=lambda item: item[1])}
    (best, shortest), *_, (worst, longest) = texts.items()
    if shortest == longest:
        return f"All {len(outcomes)} policies complete a job in {shortest} on average"
    tied = [name for name, text in texts.items() if text == shortest]
    first = f"{best} completes" if len(tied) == 1 else f"{', '.join(tied[:-1])} and {tied[-1]} complete"
    return (
        f"{first} jobs soonest of {len(outcomes)} policies: {shortest} on average; {worst} latest: {longest}"
    )


def _done(outcome: Outcome) -> np.ndarray[Any, np.dtype[np.bool_]]:
    done: np.ndarray[Any, np.dtype[np.bool_]] = ~np.isnan(outcome.finish_s) & ~outcome.stopped
    return done


def _comparable(outcomes: Sequence[Outcome]) -> bool:
    """Return True if the same jobs have ended under each policy."""
    return all((_done(one) == _done(outcomes[0])).all() for one in outcomes)


def _tables(outcomes: Sequence[Outcome]) -> Iterator[Table]:
    found = [summary(outcome) for outcome in outcomes]
    marked = len(outcomes) > 1 and _comparable(outcomes)
    best = " The best of each column is coloured." if marked else ""
    for title, columns in _TABLES.items():
        shown = [one for one in columns if one[0] != "deadlines missed" or found[0]["deadlines"]]
        times_s = [value(numbers) for _, value, write, _ in shown if write is None for numbers in found]
        unit, size_s = common_unit(filter(None, times_s))
        rows = [[numbers["policy"]] for numbers in found]
        for column in shown:
            for row, cell in zip(rows, _cells(column, found, size_s, marked), strict=True):
                row.append(cell)
        times = f"Times in {unit}. " if times_s else ""
        yield Table(title, ["policy", *(column[0] for column in shown)], rows, times + _NOTES[title] + best)


def _cells(column: _Column, found: Sequence[dict[str, Any]], size_s: float, marked: bool) -> list[str]:
    """Return a column's cells, if ``marked`` with the best coloured. ``size_s`` is the unit of times."""
    _, value, write, better = column
    write = write or (lambda seconds: number_text(seconds / size_s))
    values = [value(numbers) for numbers in found]
    texts = ["–" if number is None else write(number) for number in values]
    known = {text: number * better for text, number in zip(texts, values, strict=True) if number is not None}
    best = max(known, key=known.__getitem__) if marked and better and len(known) > 1 else None
    return [Good(text) if text == best else text for text in texts]


def _key(lines: Sequence[Line]) -> str:
    entries = "".join(
        f'<li><button type="button" data-of="{index}" aria-pressed="true">'
        f"{line_swatch(line, index)}{escape(line.name)}</button></li>"
        for index, line in enumerate(lines)
    )
    return f'<ul class="key">{entries}</ul>'


def _distributions(outcomes: Sequence[Outcome]) -> str:
    submit_s = np.array(outcomes[0].trace.submit_s)
    jct = [cumulative(outcome.policy, outcome.finish_s - submit_s) for outcome in outcomes]
    rho = [cumulative(outcome.policy, finish_time_fairness(outcome)) for outcome in outcomes]
    jct_axis = log_axis("completion − submission", np.concatenate([line.x for line in jct]), times=True)
    rho_axis = log_axis("ρ", np.concatenate([line.x for line in rho]), times=False)
    left = line_chart("Job completion time: share of jobs done within", jct_axis, jct)
    return left + line_chart("Finish-time fairness: share of jobs with at most", rho_axis, rho)


def _grid(
    outcome: Outcome, columns: int, start_s: float, end_s: float
) -> np.ndarray[Any, np.dtype[np.int64]]:
    spans = [(span.job, span.start_s - start_s, span.end_s - start_s, span.devices) for span in outcome.spans]
    return holders(spans, outcome.devices, columns, end_s)


def _use(outcomes: Sequence[Outcome], start_s: float, end_s: float) -> str:
    moments_s = (np.arange(_MOMENTS) + 0.5) / _MOMENTS * end_s
    lines = [
        Line(outcome.policy, moments_s, (_grid(outcome, _MOMENTS, start_s, end_s) >= 0).mean(axis=0))
        for outcome in outcomes
    ]
    axis = time_axis("time since the first submission", end_s)
    return line_chart("Cluster use: share of devices held", axis, lines)


def _gantts(outcomes: Sequence[Outcome], start_s: float, end_s: float) -> list[str]:
    trace, devices = outcomes[0].trace, outcomes[0].devices
    every = -(-devices // _ROWS)
    last = (devices - 1) // every
    labels = {0: "0", last: str(last * every)}
    axis = time_axis("time since the first submission", end_s)
    names = [
        f"job {job}: {demand} devices for {duration(duration_s)}"
        for job, demand, duration_s in zip(trace.ids, trace.demand, trace.duration_s, strict=True)
    ]
    pictures = []
    for outcome in outcomes:
        columns, picture = 960, ""
        while columns >= 60:
            rows = _grid(outcome, columns, start_s, end_s)[::every]
            picture = gantt(outcome.policy, axis, rows, names, labels)
            if len(picture) <= _PICTURES_BYTES / len(outcomes):
                break
            columns //= 2
        pictures.append(picture)
    which = "every device" if every == 1 else f"device 0, {every}, {2 * every} …"
    note = (
        f"One row per device ({which}), one colour per job; hover for its name. Shown is who held the device"
        " at evenly spaced moments: turns that are shorter appear as a sample of them."
    )
    return [f'<p class="faint">{escape(note)}</p>', *pictures]
