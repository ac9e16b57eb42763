"""Results as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .metrics import summary
from .outcome import Outcome
from .validate import Validation

_HEADERS = (
    "policy",
    "jobs",
    "avg JCT",
    "median",
    "p95",
    "p99",
    "queueing",
    "makespan",
    "util",
    "max rho",
    "preempt",
)


def render(outcomes: Sequence[Outcome]) -> str:
    """Return one line per policy, times in seconds; with the apps' ρ if the trace has apps."""
    found = [summary(outcome) for outcome in outcomes]
    rows: list[tuple[str, ...]] = [_HEADERS, *map(_line, found)]
    if any(numbers["rho_apps"] for numbers in found):
        column = ["max app rho", *(_number((numbers["rho_apps"] or {}).get("max"), 2) for numbers in found)]
        rows = [(*row, cell) for row, cell in zip(rows, column, strict=True)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([*lines, *(f"{o.policy}: plans by {o.solver}" for o in outcomes if o.solver)])


def _line(numbers: Mapping[str, Any]) -> tuple[str, ...]:
    jct, queueing, rho = numbers["jct_s"] or {}, numbers["queueing_s"] or {}, numbers["rho"] or {}
    return (
        numbers["policy"],
        f"{numbers['jobs_done']}/{numbers['jobs']}",
        *(_number(jct.get(key)) for key in ("mean", "median", "p95", "p99")),
        _number(queueing.get("mean")),
        _number(numbers["makespan_s"]),
        "-" if numbers["utilization"] is None else f"{numbers['utilization']:.1%}",
        _number(rho.get("max"), 2),
        str(numbers["preemptions"]),
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def render_validation(outcome: Outcome, found: Validation) -> str:
    """Return a text on how far ``outcome`` is from measurements."""
    text = (
        f"{outcome.policy}: average JCT simulated {found.simulated_s:,.0f} s, "
        f"measured {found.measured_s:,.0f} s, error {found.average_error:+.1%}"
    )
    if found.mean_absolute_error is not None:
        worst = max(found.errors, key=lambda job: abs(found.errors[job]))
        text += (
            f"; {len(found.errors)} jobs, mean absolute error {found.mean_absolute_error:.1%}, "
            f"worst job {worst} {found.errors[worst]:+.1%}"
        )
    if found.missing:
        text += f"; {found.missing} measured jobs did not end in the simulation"
    return text
