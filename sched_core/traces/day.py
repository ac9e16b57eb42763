"""What people do on a box in the course of a day, in traces: conditions of jobs, and closed devices."""

from __future__ import annotations

import csv
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from gpuslice.errors import UsageError

from .cells import Row, TraceError

WINDOWS = ("reserve", "pause", "drain")
_COLUMNS = ("what", "devices", "begin", "end")
_PRIORITY = 10**6
#: The fields of ``JobSpec`` that only the simulation of a day looks at.
FIELDS = ("begin_unix_s", "after", "time_limit_s", "priority", "at_once")


class Window(NamedTuple):
    """A time in which devices are reserved for a user, paused or drained.

    Attributes
    ----------
    what
        ``reserve``, ``pause`` or ``drain``.
    devices
        Numbers of devices, counted from 0 over all nodes.
    begin_s, end_s
        From when and until when, by the trace's clock.
    user
        Whom they are reserved for.
    """

    what: str
    devices: tuple[int, ...]
    begin_s: float
    end_s: float
    user: str


def read_windows(path: Path, devices: int) -> tuple[Window, ...]:
    """Read reservations, pauses and drains of a cluster of ``devices`` from the CSV file at ``path``.

    Raises
    ------
    UsageError
        If the file cannot be read, or a row is wrong (``TraceError``).
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(
                    f"{path}, line 1: there is no column {missing[0]!r}", f"give {', '.join(_COLUMNS)}, user"
                )
            found = [_window(Row(path, reader.line_num, cells), devices) for cells in reader]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} is not text: {error}", "give a CSV file") from error
    found.sort(key=lambda window: window.begin_s)
    for first, second in combinations(found, 2):
        both = set(first.devices) & set(second.devices)
        alike = first.what == second.what and (first.what != "reserve" or first.user != second.user)
        if both and alike and second.begin_s < first.end_s:
            raise TraceError(
                f"{path}: two windows {first.what} device {min(both)}:"
                f" from {first.begin_s:g} to {first.end_s:g} and from {second.begin_s:g} to {second.end_s:g}",
                "make one of them, or let the second begin when the first ends",
            )
    return tuple(found)


def _window(row: Row, devices: int) -> Window:
    what = row.text("what")
    if what not in WINDOWS:
        raise row.error("what", f"{what!r} is not known", f"write one of {', '.join(WINDOWS)}")
    begin_s, end_s = row.seconds("begin"), row.seconds("end")
    if end_s <= begin_s:
        raise row.error("end", f"{end_s:g} is not after the begin at {begin_s:g}")
    named = row.text("devices").split()
    if not named:
        raise row.error("devices", "nothing there")
    for name in named:
        if not name.isdecimal() or int(name) >= devices:
            remedy = f"write numbers from 0 to {devices - 1} with blanks between them"
            raise row.error("devices", f"there is no device {name!r}", remedy)
    user = row.text("user") if row.has("user") else ""
    if bool(user) != (what == "reserve"):
        wrong = f"{what} is for nobody" if user else "nothing there"
        raise row.error("user", wrong, "name the user of a reservation, and only of that")
    return Window(what, tuple(dict.fromkeys(map(int, named))), begin_s, end_s, user)


def parse_after(row: Row, column: str) -> tuple[str, ...]:
    """Return dependencies such as ``a;b:any``."""
    found = tuple(filter(None, row.text(column).split(";"))) if row.has(column) else ()
    for one in found:
        job, _, how = one.partition(":")
        if not job or how not in ("", "ok", "any", "failed"):
            raise row.error(column, f"{one!r} is no dependency", "write JOB, JOB:ok, JOB:any or JOB:failed")
    return found


def parse_priority(row: Row, column: str) -> int:
    """Return a priority; 0 if there is none."""
    priority = row.count(column, -_PRIORITY) if row.has(column) else 0
    if priority > _PRIORITY:
        raise row.error(column, f"{priority} is more than {_PRIORITY}")
    return priority


def parse_time(row: Row, column: str) -> float:
    """Return a time in seconds; 0 if there is none."""
    return row.seconds(column) if row.has(column) else 0.0
