"""Simulated policies side by side as one HTML page: numbers, distributions, cluster use, who ran where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle
from typing import Any

import numpy as np

from gpuslice.profiler.charts import (
    Line,
    cumulative,
    duration,
    gantt,
    holders,
    line_chart,
    log_axis,
    time_axis,
)
from gpuslice.profiler.html import COLOURS, Good, Table, document, render_table, swatch
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
_SHARE: Format = lambda value: f"{value:.1%}"  # noqa: E731
_TWO: Format = lambda value: f"{value:,.2f}"  # noqa: E731


def _part(key: str, part: str) -> Cell:
    return lambda found: (found[key] or {}).get(part)


#: Header, value, how it is written, and whether less (-1) or more (1) is better; 0 if neither.
_COLUMNS: tuple[tuple[str, Cell, Format, int], ...] = (
    ("jobs done", lambda found: found["jobs_done"], _COUNT, 0),
    ("mean JCT", _part("jct_s", "mean"), duration, -1),
    ("median", _part("jct_s", "median"), duration, -1),
    ("p95", _part("jct_s", "p95"), duration, -1),
    ("p99", _part("jct_s", "p99"), duration, -1),
    ("queued for a share", _part("queueing_fair_share_s", "mean"), duration, -1),
    ("for a place", _part("queueing_fragmentation_s", "mean"), duration, -1),
    ("first start", _part("first_start_s", "mean"), duration, -1),
    ("makespan", lambda found: found["makespan_s"], duration, -1),
    ("utilization", lambda found: found["utilization"], _SHARE, 1),
    ("max ρ", _part("rho", "max"), _TWO, -1),
    ("mean ρ", _part("rho", "mean"), _TWO, -1),
    ("Jain", lambda found: found["jain"], _TWO, 1),
    ("preemptions", lambda found: found["preemptions"], _COUNT, 0),
    ("migrations", lambda found: found["migrations"], _COUNT, 0),
    ("lost device time", lambda found: found["lost_device_s"], duration, 0),
    ("deadlines missed", lambda found: found["deadline_misses"], _COUNT, -1),
)


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
        render_table(_table(outcomes)),
        '<p class="faint">The best of each column is coloured. ρ is finish-time fairness: 1 is what a'
        " fair share of the cluster would have given, more is worse.</p>",
        "<h2>Distributions and use</h2>",
        _key(names),
        f'<div class="pair">{_distributions(outcomes)}</div>',
        _use(outcomes, start_s, end_s),
        "<h2>Who ran where</h2>",
        *_gantts(outcomes, start_s, end_s),
    ]
    return document(headline(outcomes), lead, parts, _SCRIPT)


def headline(outcomes: Sequence[Outcome]) -> str:
    """Return which policy has the shortest mean completion time, in one sentence."""
    means_s = {one.policy: spread["mean"] for one in outcomes if (spread := summary(one)["jct_s"])}
    if not means_s:
        return f"No job has ended under {', '.join(one.policy for one in outcomes)}"
    best, worst = (chosen(means_s, key=means_s.__getitem__) for chosen in (min, max))
    so_far = "" if all(one.complete for one in outcomes) else " so far"
    if len(outcomes) == 1:
        return f"{best} completes a job in {duration(means_s[best])} on average{so_far}"
    return (
        f"{best} completes jobs soonest of {len(outcomes)} policies{so_far}: {duration(means_s[best])} on "
        f"average; {worst} latest: {duration(means_s[worst])}"
    )


def _table(outcomes: Sequence[Outcome]) -> Table:
    found = [summary(outcome) for outcome in outcomes]
    shown = [column for column in _COLUMNS if column[0] != "deadlines missed" or found[0]["deadlines"]]
    rows = [[numbers["policy"]] for numbers in found]
    for _, value, write, better in shown:
        values = [value(numbers) for numbers in found]
        known = [number * better for number in values if number is not None]
        best = max(known) if better and len(set(known)) > 1 else None
        for row, number in zip(rows, values, strict=True):
            text = "–" if number is None else write(number)
            row.append(Good(text) if number is not None and number * better == best else text)
    return Table("Policies", ["policy", *(column[0] for column in shown)], rows)


def _key(names: Sequence[str]) -> str:
    entries = "".join(
        f'<li><button type="button" data-of="{index}" aria-pressed="true">'
        f"{swatch(colour)}{escape(name)}</button></li>"
        for index, (name, colour) in enumerate(zip(names, cycle(COLOURS), strict=False))
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
    return line_chart("Cluster use: share of devices held", axis, lines, width=1100, height=260)


def _gantts(outcomes: Sequence[Outcome], start_s: float, end_s: float) -> list[str]:
    trace, devices = outcomes[0].trace, outcomes[0].devices
    every = -(-devices // _ROWS)
    ends = ("0", str((devices - 1) // every * every))
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
            picture = gantt(outcome.policy, axis, rows, names, ends)
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
