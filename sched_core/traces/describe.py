"""What a trace contains, and writing it in gpuslice's own columns."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from .attempts import exact, write_attempts
from .trace import Trace

#: Column -> extra of the trace; written where the trace has it.
_EXTRAS = {
    "model_name": "model",
    "tenant": "tenant",
    "app": "app",
    "iterations": "steps",
    "weight": "weight",
    "skew": "skew",
    "min_gpu": "least_devices",
    "max_gpu": "most_devices",
    "cpus": "cpus",
    "memory_bytes": "host_memory_bytes",
    "begin": "begin_unix_s",
    "time_limit": "time_limit_s",
    "priority": "priority",
    "array": "array",
    "at_once": "at_once",
}


def stats(trace: Trace) -> dict[str, Any]:
    """Return numbers about ``trace``: times in seconds, service in device-seconds."""
    duration_s, demand = np.array(trace.duration_s), np.array(trace.demand)
    service, span_s = duration_s * demand, trace.submit_s[-1] - trace.submit_s[0]
    return {
        "name": trace.name,
        "jobs": len(trace),
        "left_out": dict(trace.left_out),
        "span_s": span_s,
        "service": float(service.sum()),
        "average_demand": float(service.sum() / span_s) if span_s > 0 else None,
        "duration_s": _quantiles(duration_s),
        "service_quantiles": _quantiles(service),
        "jobs_by_demand": {str(size): count for size, count in sorted(Counter(trace.demand).items())},
        "tenants": len(set(trace.extras.get("tenant", ()))),
        "failures": _failures(trace),
        "with_deadline": sum(bool(deadlines) for deadlines in trace.extras.get("deadlines", ())),
    }


def _failures(trace: Trace) -> dict[str, int]:
    """Return the number of failed attempts by class."""
    failures = [failure for attempts in trace.attempts or () for _, failure in attempts if failure]
    return dict(sorted(Counter(failures).items()))


def _quantiles(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    names = {"min": 0, "p25": 25, "median": 50, "p75": 75, "p95": 95, "max": 100}
    found = {name: float(np.percentile(values, at)) for name, at in names.items()}
    return {"mean": float(values.mean()), **found}


def write_csv(trace: Trace, path: Path) -> None:
    """Write ``trace`` so that ``read_csv`` gives it back."""
    extras = {column: trace.extras[field] for column, field in _EXTRAS.items() if field in trace.extras}
    deadlines, after = trace.extras.get("deadlines"), trace.extras.get("after")
    header = ["job_id", "num_gpu", "submit_time", "duration", *extras]
    if deadlines is not None:
        header += ["expect_time_list", "expect_value_list", "best_effort"]
    if after is not None:
        header.append("after")
    if trace.hold_until_s is not None:
        header.append("hold_until")
    if trace.attempts is not None:
        header.append("attempts")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for i in range(len(trace)):
            row = [trace.ids[i], trace.demand[i], exact(trace.submit_s[i]), exact(trace.duration_s[i])]
            row += [column[i] for column in extras.values()]
            if deadlines is not None:
                row += ["-".join(exact(pair[part]) for pair in deadlines[i]) for part in (0, 1)]
                row.append(int(not deadlines[i]))
            if after is not None:
                row.append(";".join(after[i]))
            if trace.hold_until_s is not None:
                row.append(exact(trace.hold_until_s[i]))
            if trace.attempts is not None:
                row.append(write_attempts(trace.attempts[i]))
            writer.writerow(row)
