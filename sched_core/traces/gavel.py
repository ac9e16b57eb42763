"""Gavel's and Shockwave's traces: tab-separated lines that state steps, not seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpuslice.errors import UsageError

from .cells import Row, TraceError
from .trace import Trace

_COLUMNS = (
    "job_type",
    "command",
    "directory",
    "steps_flag",
    "needs_data_dir",
    "total_steps",
    "scale_factor",
    "priority",
    "slo",
    "arrival",
)


def read_gavel(path: Path, throughputs: Path | None = None) -> Trace:
    """Read a Gavel trace; older ones lack priority and SLO. The SLO is not used.

    Parameters
    ----------
    throughputs
        Gavel's table of steps per second, ``{device: {"('TYPE', DEVICES)": {"null": rate}}}``, whose first
        device counts. Without it a step takes one second.

    Raises
    ------
    UsageError
        If a row is malformed or the table lacks a job's type.
    """
    rates = None if throughputs is None else _rates(throughputs)
    demand: list[int] = []
    submit_s: list[float] = []
    duration_s: list[float] = []
    extras: dict[str, list[Any]] = {"model": [], "weight": [], "steps": []}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            cells = line.rstrip("\r\n").split("\t")
            if len(cells) == len(_COLUMNS) - 2:
                cells[-1:-1] = ["1", "-1"]
            if len(cells) != len(_COLUMNS):
                raise TraceError(f"{path}, line {number}: {len(cells)} cells, not {len(_COLUMNS)}")
            row = Row(path, number, dict(zip(_COLUMNS, cells, strict=True)))
            demand.append(row.count("scale_factor", 1))
            submit_s.append(row.seconds("arrival"))
            steps = row.count("total_steps")
            duration_s.append(steps / _rate(rates, row, demand[-1]))
            extras["model"].append(row.text("job_type"))
            extras["weight"].append(row.above_zero("priority"))
            extras["steps"].append(steps)
    return Trace([str(i) for i in range(len(demand))], submit_s, demand, duration_s, extras, name=path.name)


def _rates(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        first = next(iter(table.values()))
    except (OSError, ValueError, AttributeError, StopIteration, RecursionError) as error:
        raise UsageError(f"{path} is no table of throughputs: {error}") from error
    if not isinstance(first, dict):
        raise UsageError(f"{path} is no table of throughputs: its first entry is not a device")
    return first


def _rate(rates: dict[str, Any] | None, row: Row, demand: int) -> float:
    if rates is None:
        return 1.0
    entry = rates.get(f"('{row.text('job_type')}', {demand})", {})
    rate = entry.get("null") if isinstance(entry, dict) else None
    if not isinstance(rate, int | float) or not rate > 0:
        raise row.error("job_type", f"no throughput of {row.text('job_type')!r} on {demand} devices is known")
    return float(rate)
