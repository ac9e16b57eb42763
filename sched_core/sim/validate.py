"""How far a simulation is from measured completion times."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpuslice.errors import UsageError
from gpuslice.sched_core.traces.cells import Row, TraceError
from gpuslice.sched_core.traces.trace import Trace

from .outcome import Outcome


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured completion times of a real run.

    Attributes
    ----------
    average_s
        Average JCT; of the jobs named in ``jct_s`` if there are any, else of all.
    jct_s
        JCT by the job's number in the trace; empty if only the average was measured.
    """

    average_s: float
    jct_s: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Validation:
    """The errors of a simulation against measured times.

    Attributes
    ----------
    simulated_s, measured_s
        Average JCTs.
    errors
        Relative error, simulated / measured - 1, by job; empty if only the average was measured.
    missing
        Measured jobs that did not end in the simulation; left out of everything else.
    """

    simulated_s: float
    measured_s: float
    errors: dict[str, float] = field(default_factory=dict)
    missing: int = 0

    @property
    def average_error(self) -> float:
        """Return the relative error of the average JCT."""
        return self.simulated_s / self.measured_s - 1.0

    @property
    def mean_absolute_error(self) -> float | None:
        """Return the mean of the jobs' absolute relative errors. Return None without jobs."""
        return sum(map(abs, self.errors.values())) / len(self.errors) if self.errors else None


def read_measured(path: Path, trace: Trace) -> Measured:
    """Read a CSV of ``job_id`` and ``jct`` (seconds) or ``end_time`` (the trace's clock).

    One row ``average,SECONDS`` instead of single jobs gives only the average over all jobs.

    Raises
    ------
    UsageError
        If the file is malformed or names an unknown job, or one twice.
    """
    position = {name: i for i, name in enumerate(trace.ids)}
    jct_s: dict[int, float] = {}
    for row in _rows(path):
        name = row.text("job_id")
        if name == "average":
            return Measured(row.above_zero("jct"))
        if name not in position:
            raise row.error("job_id", f"the trace has no job {name!r}")
        number = position[name]
        if number in jct_s:
            raise row.error("job_id", f"job {name!r} is there twice")
        jct_s[number] = _took_s(row, trace.submit_s[number])
    if not jct_s:
        raise UsageError(f"{path} names no job", "give rows of job_id,jct")
    return Measured(sum(jct_s.values()) / len(jct_s), jct_s)


def validate(outcome: Outcome, measured: Measured) -> Validation:
    """Compare ``outcome`` with what was measured of the same trace."""
    jct_s = outcome.finish_s - np.array(outcome.trace.submit_s)
    if not measured.jct_s:
        return Validation(float(np.nanmean(jct_s)), measured.average_s)
    both = {number: took_s for number, took_s in measured.jct_s.items() if not np.isnan(jct_s[number])}
    errors = {outcome.trace.ids[number]: float(jct_s[number]) / took_s - 1 for number, took_s in both.items()}
    count = max(1, len(both))
    return Validation(
        float(sum(jct_s[number] for number in both)) / count,
        sum(both.values()) / count or 1.0,
        errors,
        len(measured.jct_s) - len(both),
    )


def _took_s(row: Row, submit_s: float) -> float:
    column = "jct" if row.has("jct") else "end_time"
    took_s = row.seconds(column) - (submit_s if column == "end_time" else 0.0)
    if not took_s > 0:
        raise row.error(column, "the job took no time")
    return took_s


def _rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            if "job_id" not in columns or not {"jct", "end_time"} & set(columns):
                raise TraceError(f"{path}, line 1: there are no columns job_id and jct (or end_time)")
            for cells in reader:
                yield Row(path, reader.line_num, cells)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} is not text: {error}") from error
