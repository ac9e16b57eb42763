"""How far a simulation is from measured completion times."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpuslice.errors import UsageError
from gpuslice.sched_core.traces.cells import Row

from .outcome import Outcome


@dataclass(frozen=True, slots=True)
class Validation:
    """A comparison.

    Attributes
    ----------
    simulated_s, measured_s
        Average JCTs.
    errors
        Relative error, simulated / measured - 1, by job; empty if only the average was measured.
    """

    simulated_s: float
    measured_s: float
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def average_error(self) -> float:
        """Relative error of the average JCT."""
        return self.simulated_s / self.measured_s - 1.0

    @property
    def mean_absolute_error(self) -> float | None:
        """Mean of the jobs' absolute relative errors; ``None`` without jobs."""
        return sum(map(abs, self.errors.values())) / len(self.errors) if self.errors else None


def validate(outcome: Outcome, measured: Path) -> Validation:
    """Compare with a CSV of ``job_id`` and ``jct`` (seconds) or ``end_time`` (the trace's clock).

    One row ``average,SECONDS`` instead of single jobs gives only the average over all jobs.

    Raises
    ------
    UsageError
        If the file is malformed or names an unknown job.
    """
    jct_s = outcome.finish_s - np.array(outcome.trace.submit_s)
    position = {name: i for i, name in enumerate(outcome.trace.ids)}
    simulated: list[float] = []
    truth: list[float] = []
    errors: dict[str, float] = {}
    for row in _rows(measured):
        name = row.text("job_id")
        if name == "average":
            return Validation(float(np.nanmean(jct_s)), row.seconds("jct"))
        if name not in position:
            raise row.error("job_id", f"the trace has no job {name!r}")
        index = position[name]
        took_s = _took_s(row, outcome.trace.submit_s[index])
        simulated.append(float(jct_s[index]))
        truth.append(took_s)
        errors[name] = simulated[-1] / took_s - 1.0
    if not truth:
        raise UsageError(f"{measured} names no job", "give rows of job_id,jct")
    return Validation(sum(simulated) / len(simulated), sum(truth) / len(truth), errors)


def _took_s(row: Row, submit_s: float) -> float:
    column = "jct" if row.has("jct") else "end_time"
    took_s = row.seconds(column) - (submit_s if column == "end_time" else 0.0)
    if not took_s > 0:
        raise row.error(column, "the job took no time")
    return took_s


def _rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for cells in reader:
                yield Row(path, reader.line_num, cells)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
