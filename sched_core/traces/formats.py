"""Trace files: which format a file has, and reading each (docs/simulate.md lists columns and sources)."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from gpuslice.errors import UsageError
from gpuslice.sched_core.options import nearest

from .attempts import parse_attempts
from .cells import Row, TraceError
from .day import parse_after, parse_priority, parse_time
from .gavel import read_gavel
from .philly import read_philly
from .trace import Attempt, Trace

#: Columns that a CSV trace must have.
REQUIRED = ("job_id", "num_gpu", "submit_time", "duration")


def read_trace(path: Path, trace_format: str = "auto", throughputs: Path | None = None) -> Trace:
    """Read the trace at ``path``.

    Parameters
    ----------
    trace_format
        ``csv``, ``philly``, ``gavel``, ``alibaba``, or ``auto`` to tell from the content.
    throughputs
        For Gavel's traces, see ``read_gavel``.

    Raises
    ------
    UsageError
        If the file cannot be read, the format is unknown, or (``TraceError``) a row is malformed.
    """
    try:
        if trace_format == "auto":
            trace_format = _detect(path)
        if trace_format == "gavel":
            return read_gavel(path, throughputs)
        if throughputs is not None:
            raise UsageError(
                f"{path} is {trace_format}; only Gavel's traces count steps", "leave out --throughputs"
            )
        reader = READERS.get(trace_format)
        if reader is None:
            raise UsageError(f"there is no trace format {trace_format!r}", nearest(trace_format, READERS))
        return reader(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} is not text: {error}", "give a trace file") from error


def _detect(path: Path) -> str:
    with path.open(encoding="utf-8-sig") as file:
        head = file.readline(65536)
    if not head:
        raise TraceError(f"{path} is empty", "give a trace file")
    if head.lstrip().startswith(("[", "{")):
        return "philly"
    if head.count("\t") >= 7:
        return "gavel"
    columns = [column.strip() for column in head.split(",")]
    if "gpu_milli" in columns:
        return "alibaba"
    if "num_gpu" in columns or "job_id" in columns:
        return "csv"
    raise TraceError(f"{path} is of no known trace format", f"say which with --format: {', '.join(READERS)}")


def _rows(path: Path, required: tuple[str, ...]) -> Iterator[Row]:
    """Yield the lines of a CSV file whose header has the ``required`` columns."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        columns = list(reader.fieldnames or ())
        for column in required:
            if column not in columns:
                raise TraceError(f"{path}, line 1: there is no column {column!r}", nearest(column, columns))
        for column, times in Counter(columns).items():
            if times > 1:
                raise TraceError(f"{path}, line 1: there are {times} columns {column!r}", "keep one")
        for cells in reader:
            row = Row(path, reader.line_num, cells)
            if None in cells:
                raise row.error(columns[-1], f"there are more cells than the {len(columns)} columns")
            yield row


def read_csv(path: Path) -> Trace:
    """Read Tiresias' columns, and Chronus' and gpuslice's further ones where they are there."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        columns = next(csv.reader(file, skipinitialspace=True), [])
    if "user" in columns and "tenant" in columns:
        raise TraceError(f"{path}, line 1: columns 'user' and 'tenant' both give the tenant", "keep one")
    optional = {column: field for column, field in _OPTIONAL.items() if column in columns}
    ids: list[str] = []
    lines: dict[str, int] = {}
    submit_s: list[float] = []
    demand: list[int] = []
    duration_s: list[float] = []
    extras: dict[str, list[Any]] = {field: [] for field, _ in optional.values()}
    attempts: list[tuple[Attempt, ...]] | None = [] if "attempts" in columns else None
    hold_until_s: list[float] | None = [] if "hold_until" in columns else None
    for row in _rows(path, REQUIRED):
        ids.append(row.text("job_id"))
        if lines.setdefault(ids[-1], row.line) != row.line:
            raise row.error("job_id", f"line {lines[ids[-1]]} has a job {ids[-1]!r} already")
        demand.append(row.count("num_gpu", 1))
        submit_s.append(row.seconds("submit_time"))
        duration_s.append(row.seconds("duration"))
        for column, (field, convert) in optional.items():
            extras[field].append(convert(row, column))
        _check_bounds(row, demand[-1])
        if attempts is not None:
            attempts.append(_attempts(row, duration_s[-1]))
        if hold_until_s is not None:
            hold_until_s.append(parse_time(row, "hold_until"))
        if row.has("at_once") and not row.has("array"):
            raise row.error("at_once", "the job is of no array", "name one in the column array")
    _check_order(path, ids, submit_s, extras)
    return Trace(ids, submit_s, demand, duration_s, extras, path.name, attempts, hold_until_s=hold_until_s)


def _check_order(
    path: Path, ids: list[str], submit_s: list[float], extras: Mapping[str, Sequence[Any]]
) -> None:
    """Raise an error if a job is to start after a job or an array that is not there before it."""
    moments = list(zip(submit_s, range(len(ids)), strict=True))
    there = dict(zip(ids, moments, strict=True))
    for array, moment in zip(extras.get("array", ()), moments, strict=False):
        if array:
            # The scheduler knows an array as a whole: all of its jobs come first.
            there[array] = max(moment, there.get(array, moment))
    for job, moment, dependencies in zip(ids, moments, extras.get("after", ()), strict=False):
        for other in (one.partition(":")[0] for one in dependencies):
            if other not in there or there[other] >= moment:
                raise TraceError(
                    f"{path}: job {job!r} is to start after {other!r}, which is not submitted before it",
                    "name jobs or arrays of the trace that are submitted earlier",
                )


def _deadlines(row: Row, column: str) -> tuple[tuple[float, float], ...]:
    """Return Chronus' deadlines with values, such as ``470-490`` with ``10-8``.

    Best-effort jobs have none.
    """
    if (row.has("best_effort") and row.count("best_effort")) or not row.has(column):
        return ()
    times, values = row.text(column).split("-"), row.text("expect_value_list").split("-")
    if len(times) != len(values):
        raise row.error(column, f"{len(times)} times but {len(values)} values")
    try:
        found = tuple((float(time_s), float(value)) for time_s, value in zip(times, values, strict=True))
    except ValueError:
        raise row.error(column, f"{row.text(column)!r} is not a list of numbers") from None
    if not all(map(isfinite, chain.from_iterable(found))):
        raise row.error(column, "deadlines and their values are finite")
    if any(later[0] <= sooner[0] for sooner, later in pairwise(found)):
        raise row.error(column, f"{row.text(column)} does not ascend", "write the earliest deadline first")
    return found


def _check_bounds(row: Row, demand: int) -> None:
    """Raise an error if the number of devices is not within the bounds of an elastic job."""
    if row.has("min_gpu") and row.count("min_gpu") > demand:
        raise row.error("min_gpu", f"{row.text('min_gpu')} is more than the num_gpu of {demand}")
    if row.has("max_gpu") and 0 < row.count("max_gpu") < demand:
        raise row.error("max_gpu", f"{row.text('max_gpu')} is less than the num_gpu of {demand}")


def _attempts(row: Row, duration_s: float) -> tuple[Attempt, ...]:
    """Return the attempts that make up ``duration_s``.

    If none are stated, return one that went well.
    """
    if not row.has("attempts"):
        return ((duration_s, ""),)
    try:
        found = parse_attempts(row.text("attempts"))
    except ValueError as error:
        raise row.error("attempts", str(error), "write e.g. 600:user;300:ok") from None
    total_s = sum(took_s for took_s, _ in found)
    if abs(total_s - duration_s) > 1:
        raise row.error("attempts", f"they take {total_s:g} s together, the duration is {duration_s:g} s")
    return found


def _optional_text(row: Row, column: str) -> str:
    return row.text(column) if row.has(column) else ""


def _optional_count(row: Row, column: str) -> int:
    return row.count(column) if row.has(column) else 0


#: Optional column -> field of JobSpec and how to read it.
_OPTIONAL: dict[str, tuple[str, Callable[[Row, str], object]]] = {
    "model_name": ("model", _optional_text),
    "user": ("tenant", _optional_text),
    "tenant": ("tenant", _optional_text),
    "app": ("app", _optional_text),
    "iterations": ("steps", _optional_count),
    "weight": ("weight", lambda row, column: row.above_zero(column) if row.has(column) else 1.0),
    "skew": ("skew", Row.share),
    "min_gpu": ("least_devices", _optional_count),
    "max_gpu": ("most_devices", _optional_count),
    "cpus": ("cpus", _optional_count),
    "memory_bytes": ("host_memory_bytes", _optional_count),
    "expect_time_list": ("deadlines", _deadlines),
    "begin": ("begin_unix_s", parse_time),
    "after": ("after", parse_after),
    "time_limit": ("time_limit_s", parse_time),
    "priority": ("priority", parse_priority),
    "array": ("array", _optional_text),
    "at_once": ("at_once", _optional_count),
}


def read_alibaba(path: Path) -> Trace:
    """Read pods of Alibaba's cluster-trace-gpu-v2023.

    Pods without GPUs are left out, shares count as one GPU.
    """
    ids: list[str] = []
    submit_s: list[float] = []
    demand: list[int] = []
    duration_s: list[float] = []
    left_out: Counter[str] = Counter()
    required = ("name", "num_gpu", "creation_time", "deletion_time")
    for row in _rows(path, required):
        if row.count("num_gpu") == 0:
            left_out["asks for no GPU"] += 1
            continue
        created_s, deleted_s = row.seconds("creation_time"), row.seconds("deletion_time")
        started_s = row.seconds("scheduled_time") if row.has("scheduled_time") else created_s
        if deleted_s < started_s:
            raise row.error("deletion_time", f"{deleted_s:g} is before the pod was started, at {started_s:g}")
        ids.append(row.text("name"))
        demand.append(row.count("num_gpu"))
        submit_s.append(created_s)
        duration_s.append(deleted_s - started_s)
    return Trace(ids, submit_s, demand, duration_s, name=path.name, left_out=dict(left_out))


READERS: dict[str, Callable[[Path], Trace]] = {
    "csv": read_csv,
    "philly": read_philly,
    "gavel": read_gavel,
    "alibaba": read_alibaba,
}
