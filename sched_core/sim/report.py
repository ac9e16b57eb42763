"""Writing results: per-job CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from .apps import apps_of
from .metrics import finish_time_fairness, summary
from .outcome import Outcome
from .spans import Span
from .validate import Validation

PER_JOB_COLUMNS: tuple[str, ...] = (
    "job_id",
    "submit_time",
    "start_time",
    "end_time",
    "preempt",
    "promote",
    "num_gpu",
    "duration",
    "executed_time",
    "service",
    "lost_service",
    "fragmentation_time",
    "migrate",
    "rho",
    "stopped",
    "fair_share_time",
    "rho_paper",
)


#: Jobs that are turned into Python's numbers at a time.
_CHUNK = 4096

Row = tuple[Any, ...]


def per_job(outcome: Outcome) -> Iterator[Row]:
    """Yield one row per job, in the order of ``PER_JOB_COLUMNS``.

    None where something did not happen.
    """
    trace, promotions = outcome.trace, outcome.promotions
    rho, rho_paper = finish_time_fairness(outcome), finish_time_fairness(outcome, times_n=True)
    for first in range(0, len(trace), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        times: dict[str, Iterable[float]] = {
            "submit_time": trace.submit_s[chunk],
            "duration": trace.duration_s[chunk],
            "start_time": outcome.first_start_s[chunk].tolist(),
            "end_time": outcome.finish_s[chunk].tolist(),
            "executed_time": outcome.executed_s[chunk].tolist(),
            "service": outcome.service_s[chunk].tolist(),
            "lost_service": outcome.lost_s[chunk].tolist(),
            "fragmentation_time": outcome.fragmented_s[chunk].tolist(),
            "fair_share_time": outcome.fair_share_s[chunk].tolist(),
            "rho": rho[chunk].tolist(),
            "rho_paper": rho_paper[chunk].tolist(),
        }
        columns: dict[str, Iterable[Any]] = {
            "job_id": trace.ids[chunk],
            "num_gpu": trace.demand[chunk],
            "preempt": outcome.preemptions[chunk].tolist(),
            "migrate": outcome.migrations[chunk].tolist(),
            "stopped": map(int, outcome.stopped[chunk].tolist()),
            "promote": [promotions.get(job, 0) for job in range(len(trace))[chunk]],
            **{name: map(_number, column) for name, column in times.items()},
        }
        yield from zip(*(columns[name] for name in PER_JOB_COLUMNS), strict=True)


def write_per_job(outcome: Outcome, path: Path) -> None:
    """Write ``per_job`` as CSV. Cells are empty where something did not happen."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(PER_JOB_COLUMNS)
        writer.writerows(per_job(outcome))


def path_for(path: Path, outcome: Outcome, *, several: bool) -> Path:
    """Return the file of ``outcome``: ``OUT.POLICY.csv`` if ``several`` policies share ``OUT.csv``."""
    return path.with_name(f"{path.stem}.{outcome.policy}{path.suffix}") if several else path


def write_json(outcomes: Sequence[Outcome], path: Path, validations: Sequence[Validation] = ()) -> None:
    """Write ``{"version": 1, "policies": [{"summary": ..., "jobs": [...]}, ...]}`` (docs/json.md).

    It is written job by job: the whole document would take many times as much memory as the simulation.
    ``validations``, one per outcome or none at all, become the policies' ``validation``.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n "version": 1,\n "policies": [')
        for number, outcome in enumerate(outcomes):
            file.write(f'{"," if number else ""}\n  {{\n   "summary": {_indented(summary(outcome), 3)},')
            file.write('\n   "jobs": [')
            file.writelines(_jobs(outcome))
            file.write(f'\n   ],\n   "apps": {_indented(_apps(outcome), 3)}')
            if number < len(validations):
                file.write(f',\n   "validation": {_indented(_validation(validations[number]), 3)}')
            file.write("\n  }")
        file.write("\n ]\n}\n" if outcomes else "]\n}\n")


def _indented(value: object, depth: int) -> str:
    """Return ``value`` as JSON whose further lines are indented by ``depth`` more.

    No text in it has a line end.
    """
    return json.dumps(value, indent=1, allow_nan=False).replace("\n", "\n" + " " * depth)


def _jobs(outcome: Outcome) -> Iterator[str]:
    """Yield the entries of ``jobs``, each with the comma before it: ``per_job`` with ``placements``."""
    line = "".join(f'\n     "{name}": %s,' for name in PER_JOB_COLUMNS)
    spans = outcome.spans
    order, bounds = spans.by_job(len(outcome.trace))
    first = 0
    for job, row in enumerate(per_job(outcome)):
        last = int(bounds[job + 1])
        placements = ",".join([_placement(spans[number]) for number in order[first:last].tolist()])
        held = f"{placements}\n     " if placements else ""
        name, *numbers = row
        cells = (json.dumps(name), *("null" if number is None else number for number in numbers))
        yield f'{"," if job else ""}\n    {{{line % cells}\n     "placements": [{held}]\n    }}'
        first = last


def _placement(span: Span) -> str:
    start, end = (json.dumps(_number(time_s)) for time_s in (span.start_s, span.end_s))
    devices = ",\n        ".join(map(str, span.devices))
    return (
        f'\n      {{\n       "start": {start},\n       "end": {end},'
        f'\n       "devices": [\n        {devices}\n       ]\n      }}'
    )


def _validation(found: Validation) -> dict[str, Any]:
    return {
        "simulated_s": found.simulated_s,
        "measured_s": found.measured_s,
        "average_error": found.average_error,
        "mean_absolute_error": found.mean_absolute_error,
        "missing": found.missing,
        "errors": found.errors,
    }


def _apps(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "app": app.name,
            "num_jobs": app.jobs,
            "submit_time": _number(app.submit_s),
            "end_time": _number(app.end_s),
            "rho": _number(app.rho),
            "rho_paper": _number(app.rho_paper),
        }
        for app in apps_of(outcome)
    ]


def _number(value: float) -> float | int | None:
    """Return a whole number without a point, for comparison with integer simulators.

    Return None for NaN and infinity.
    """
    if isnan(value) or value in (float("inf"), float("-inf")):
        return None
    return int(value) if value.is_integer() else value
