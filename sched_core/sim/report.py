"""Writing results: per-job CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

from .apps import apps_of
from .metrics import finish_time_fairness, summary
from .outcome import Outcome
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


def per_job(outcome: Outcome) -> list[dict[str, Any]]:
    """One row per job with the keys of ``PER_JOB_COLUMNS``; ``None`` where something did not happen."""
    trace, rho = outcome.trace, finish_time_fairness(outcome)
    rho_paper = finish_time_fairness(outcome, times_n=True)
    return [
        {
            "job_id": trace.ids[i],
            "submit_time": _number(trace.submit_s[i]),
            "start_time": _number(float(outcome.first_start_s[i])),
            "end_time": _number(float(outcome.finish_s[i])),
            "preempt": int(outcome.preemptions[i]),
            "promote": outcome.promotions.get(i, 0),
            "num_gpu": trace.demand[i],
            "duration": _number(trace.duration_s[i]),
            "executed_time": _number(float(outcome.executed_s[i])),
            "service": _number(float(outcome.service_s[i])),
            "lost_service": _number(float(outcome.lost_s[i])),
            "fragmentation_time": _number(float(outcome.fragmented_s[i])),
            "migrate": int(outcome.migrations[i]),
            "rho": _number(float(rho[i])),
            "stopped": int(outcome.stopped[i]),
            "fair_share_time": _number(float(outcome.fair_share_s[i])),
            "rho_paper": _number(float(rho_paper[i])),
        }
        for i in range(len(trace))
    ]


def write_per_job(outcome: Outcome, path: Path) -> None:
    """Write ``per_job`` as CSV; empty cells where something did not happen."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, PER_JOB_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(per_job(outcome))


def path_for(path: Path, outcome: Outcome, *, several: bool) -> Path:
    """Where the jobs of ``outcome`` go: ``OUT.POLICY.csv`` if ``several`` policies share ``OUT.csv``."""
    return path.with_name(f"{path.stem}.{outcome.policy}{path.suffix}") if several else path


def write_json(outcomes: Sequence[Outcome], path: Path, validations: Sequence[Validation] = ()) -> None:
    """Write ``{"version": 1, "policies": [{"summary": ..., "jobs": [...]}, ...]}`` (docs/simulator.md).

    ``validations``, one per outcome or none at all, become the policies' ``validation``.
    """
    policies: list[dict[str, Any]] = [
        {"summary": summary(outcome), "jobs": _with_placements(outcome), "apps": _apps(outcome)}
        for outcome in outcomes
    ]
    for policy, found in zip(policies, validations, strict=False):
        policy["validation"] = {
            "simulated_s": found.simulated_s,
            "measured_s": found.measured_s,
            "average_error": found.average_error,
            "mean_absolute_error": found.mean_absolute_error,
            "missing": found.missing,
            "errors": found.errors,
        }
    text = json.dumps({"version": 1, "policies": policies}, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


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


def _with_placements(outcome: Outcome) -> list[dict[str, Any]]:
    rows = per_job(outcome)
    for row in rows:
        row["placements"] = []
    for span in outcome.spans:
        placement = {"start": _number(span.start_s), "end": _number(span.end_s), "devices": span.devices}
        rows[span.job]["placements"].append(placement)
    return rows


def _number(value: float) -> float | int | None:
    """Whole numbers without a point, so that files compare with integer simulators; no NaN, no infinity."""
    if isnan(value) or value in (float("inf"), float("-inf")):
        return None
    return int(value) if value.is_integer() else value
