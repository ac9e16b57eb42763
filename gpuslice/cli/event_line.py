"""One event of the journal as a line for people: local time, job, what happened, values with units."""

from __future__ import annotations

from datetime import datetime

from gpuslice.config import format_size
from gpuslice.verbs import EventInfo

from .text_width import cut, one_line


def narrow(event: EventInfo, columns: int) -> str:
    """Return the line for a terminal: cut to ``columns``, with spaces between its fields."""
    return cut("  ".join(one_line(field) for field in line(event).split("\t") if field), columns)


def line(event: EventInfo) -> str:
    """Return the line: time, job, event and details, separated by tabs."""
    who = event.job if event.rank is None else f"{event.job}:{event.rank}"
    # What was not asked for when a job was submitted says nothing.
    told = {
        name: value
        for name, value in event.details.items()
        if value not in ("", None) and (event.what != "submitted" or (value and name != "submit_s"))
    }
    details = " ".join(_with_unit(name, value) for name, value in told.items())
    if event.what == "waits":
        details = str(event.details.get("why", ""))
    return f"{_when(event)}\t{who}\t{event.what}\t{details}"


def _when(event: EventInfo) -> str:
    """Return the local time. Without it, return the time of the scheduler's clock."""
    if event.unix_s is None:
        return f"{event.at_s:.3f} s"
    return local_time(event.unix_s)


def local_time(unix_s: float) -> str:
    """Return a time as the clock on the wall shows it, with milliseconds."""
    return datetime.fromtimestamp(unix_s).isoformat(sep=" ", timespec="milliseconds")


def _with_unit(name: str, value: float | str | bool | None) -> str:
    """Return ``after=2.000s`` for ``after_s`` and ``bytes=1.00MiB`` for a number of bytes."""
    if isinstance(value, float) and name.endswith("_unix_s"):
        return f"{name.removesuffix('_unix_s')}={datetime.fromtimestamp(value).isoformat(timespec='seconds')}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_s"):
            return f"{name.removesuffix('_s')}={value:.3f}s"
        if name == "bytes" or name.endswith("_bytes"):
            return f"{name}={format_size(int(value)).replace(' ', '')}"
        if isinstance(value, float):
            return f"{name}={value:.4g}"
    return f"{name}={value}"
