"""Microsoft's Philly trace: ``cluster_job_log``, JSON with one object per job and its attempts.

Source: Jeon et al., ATC 2019. Its times are local times of the US Pacific coast, without an offset. The log
spans the end of daylight saving time of 2017, when one hour of the clock came twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpuslice.errors import UsageError

from .cells import TraceError
from .trace import Attempt, Trace

_NOT_STARTED = "never ran"
_NOT_ENDED = "has an attempt that has not ended"
_NO_GPU = "had no GPU in its last attempt"
_BACKWARDS = "has an attempt that ends before it starts"


@dataclass(frozen=True, slots=True)
class _Job:
    id: str
    submit_s: float
    demand: int
    tenant: str
    attempts: tuple[Attempt, ...]


class _LeftOutError(Exception):
    """The reason why a job of the log is left out of the trace."""


def read_philly(path: Path) -> Trace:
    """Read Philly's log. The duration of a job is the sum over its attempts.

    Jobs that never ran, have not ended or contradict themselves are left out and counted by cause in
    ``Trace.left_out``. Failures are ``persistent`` where the job failed in the end, else ``transient``: the
    log says no more.

    Raises
    ------
    TraceError
        If the file is not such a log; the message names the job.
    UsageError
        If this machine has no table of time zones.
    """
    try:
        zone = ZoneInfo("America/Los_Angeles")
    except ZoneInfoNotFoundError as error:
        raise UsageError(
            f"{path} has times of the zone America/Los_Angeles, which this machine does not know",
            "install the package tzdata with pip",
        ) from error
    left_out: Counter[str] = Counter()
    jobs: list[_Job] = []
    for number, entry in enumerate(_entries(path)):
        try:
            jobs.append(_job(entry, zone))
        except _LeftOutError as cause:
            left_out[str(cause)] += 1
        except KeyError as error:
            raise TraceError(f"{path}, job {number} has no {error}") from error
        except (IndexError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, job {number}: {error}") from error
    first_s = min((job.submit_s for job in jobs), default=0.0)
    return Trace(
        [job.id for job in jobs],
        [job.submit_s - first_s for job in jobs],
        [job.demand for job in jobs],
        [sum(took_s for took_s, _ in job.attempts) for job in jobs],
        {"tenant": [job.tenant for job in jobs]},
        path.name,
        [job.attempts for job in jobs],
        dict(left_out),
    )


def _entries(path: Path) -> list[Any]:
    """Return the objects of the log, one per job, not yet checked."""
    try:
        log = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path} is no JSON: {error}", "give Philly's cluster_job_log") from error
    if not isinstance(log, list):
        raise TraceError(f"{path} holds no list of jobs", "give Philly's cluster_job_log")
    return log


def _job(entry: Any, zone: ZoneInfo) -> _Job:
    """Return the job that ``entry`` describes, or raise `_LeftOutError` with the cause."""
    runs = [run for run in entry["attempts"] if _is_time(run["start_time"])]
    if not runs:
        raise _LeftOutError(_NOT_STARTED)
    if not all(_is_time(run["end_time"]) for run in runs):
        raise _LeftOutError(_NOT_ENDED)
    demand = sum(len(node["gpus"]) for node in runs[-1]["detail"])
    if not demand:
        raise _LeftOutError(_NO_GPU)
    texts = [entry["submitted_time"], *(run[key] for run in runs for key in ("start_time", "end_time"))]
    submit_s, *moments_s = _moments(texts, zone)
    took_s = [end_s - start_s for start_s, end_s in zip(moments_s[::2], moments_s[1::2], strict=True)]
    if min(took_s) < 0:
        raise _LeftOutError(_BACKWARDS)
    failed = entry.get("status") == "Failed"
    failures = ["persistent" if failed else "transient"] * len(runs)
    ends = failures if failed else [*failures[1:], ""]
    attempts = tuple(zip(took_s, ends, strict=True))
    return _Job(str(entry["jobid"]), submit_s, demand, str(entry.get("vc", "")), attempts)


def _is_time(text: object) -> bool:
    """Return True if an attempt has this time; the log writes null, nothing or the text None if not."""
    return bool(text) and text != "None"


def _moments(texts: Sequence[str], zone: ZoneInfo) -> Iterator[float]:
    """Yield the times of a list, in order, as seconds since 1970.

    An hour that the clock showed twice is the first one, unless that was before the previous time.
    """
    previous_s = float("-inf")
    for text in texts:
        first_s, second_s = _readings(text, zone)
        previous_s = first_s if first_s >= previous_s else second_s
        yield previous_s


def _readings(text: str, zone: ZoneInfo) -> tuple[float, float]:
    """Return the two times at which a clock with daylight saving can have shown ``text``; mostly equal."""
    shown, _, named = text.partition(" P")  # some of its files name the zone: PST or PDT
    if named not in ("", "ST", "DT"):
        raise ValueError(f"{text!r} is no time of the zone America/Los_Angeles")
    moment = datetime.strptime(shown, "%Y-%m-%d %H:%M:%S").replace(tzinfo=zone)
    first_s, second_s = (moment.replace(fold=fold).astimezone(UTC).timestamp() for fold in (0, 1))
    if named:
        return (second_s, second_s) if named == "ST" else (first_s, first_s)
    return first_s, second_s
