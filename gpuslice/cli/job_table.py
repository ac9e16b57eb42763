"""The table of ``gpuslice ps``: one line a job, at most 100 columns wide."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

from gpuslice.verbs import ArrayInfo, JobInfo

from . import array_lines, tables
from .tables import Row
from .text_width import cut, cut_inside, one_line, padded, width

_COLUMNS = ("JOB", "USER", "STATE", "DEVICE", "PROGRESS", "TIME", "WHY")
_WHY = _COLUMNS.index("WHY")
#: Columns of names, which are cut in the middle.
_NAMES = (_COLUMNS.index("JOB"), _COLUMNS.index("USER"))
#: No line is longer, on terminals and elsewhere.
MOST_COLUMNS = 100
#: No terminal is taken to be narrower: below that lines wrap.
_LEAST_COLUMNS = 40
_GAP = "  "
#: Columns that become narrower where there is no room for the reason, and how narrow.
_SHRINK = {"JOB": 14, "USER": 6, "DEVICE": 8}
#: Columns that are left out of a narrow table, the first first.
_LEAVE_OUT = ("USER", "TIME", "PROGRESS", "DEVICE")
#: So many columns reasons get if others can become narrower, and if others can be left out.
_GOOD_WHY, _LEAST_WHY = 44, 16
_NUMBERED = re.compile(r"(.*:)(\d+)")


def show(jobs: Sequence[JobInfo], arrays: Sequence[ArrayInfo] = ()) -> None:
    """Print ``jobs`` and ``arrays``, those that have not ended first."""
    rows: list[JobInfo | ArrayInfo] = list(jobs)
    for array in reversed(arrays):
        rows.insert(array.place, array)
    table = lines(rows, terminal_columns() if sys.stdout.isatty() else MOST_COLUMNS)
    tables.print_lines(table, state=[cell.rstrip() for cell in table[0]].index("STATE"))


def terminal_columns() -> int:
    """Return how many columns a line may have on this terminal."""
    return max(_LEAST_COLUMNS, min(MOST_COLUMNS, shutil.get_terminal_size().columns))


def lines(jobs: Sequence[JobInfo | ArrayInfo], columns: int = MOST_COLUMNS) -> list[list[str]]:
    """Return the table's lines, header first, as cells that have been cut and padded to fit ``columns``."""
    rows = [_COLUMNS, *map(_row, sorted(jobs, key=_has_ended))]
    widths = _fitted(rows, columns)
    return [[_cell(row[number], wide, number) for number, wide in widths.items()] for row in rows]


def _cell(text: str, columns: int, number: int) -> str:
    if number == _WHY:
        return cut(text, columns)
    return padded(cut_inside(text, columns) if number in _NAMES else cut(text, columns), columns)


def _fitted(rows: Sequence[Row], columns: int) -> dict[int, int]:
    """Return the widths of the columns that are shown, by number."""
    widths = {number: max(width(row[number]) for row in rows) for number in range(len(_COLUMNS))}
    longest = widths.pop(_WHY)
    least = {number: _SHRINK.get(_COLUMNS[number], wide) for number, wide in widths.items()}

    def room() -> int:
        return columns - sum(widths.values()) - len(_GAP) * len(widths)

    while room() < min(longest, _GOOD_WHY):
        number = max(widths, key=lambda n: widths[n] - least[n])
        if widths[number] <= least[number]:
            break
        widths[number] -= 1
    for name in _LEAVE_OUT:
        if room() < min(longest, _LEAST_WHY):
            del widths[_COLUMNS.index(name)]
    return {**widths, _WHY: min(longest, max(1, room()))}


def _has_ended(job: JobInfo | ArrayInfo) -> bool:
    return job.ended if isinstance(job, JobInfo) else array_lines.ended(job)


def _row(job: JobInfo | ArrayInfo) -> Row:
    if isinstance(job, JobInfo):
        state, progress, why = job.state, _progress(job), one_line(reason(job))
    else:
        state, progress, why = array_lines.state(job), array_lines.progress(job), array_lines.counts(job)
    devices, trained = ",".join(runs(job.devices)) or "-", tables.duration(job.executed_s)
    return job.id, one_line(job.tenant) or "-", state, devices, progress, trained, why


def reason(job: JobInfo) -> str:
    """Return why a job does not train, or how it ended."""
    if job.why is not None or not job.ended:
        return job.why or ""
    code = f"exit {job.exit_code}" if job.exit_code else ""
    ending = ", ".join(filter(None, (code, job.failure)))
    return ": ".join(filter(None, (ending, job.reason)))


def _progress(job: JobInfo) -> str:
    """Return the part of its steps that a job has made, or their number."""
    if not job.total_steps:
        return f"{_short(job.steps)} steps" if job.steps else "-"
    return f"{min(100, 100 * job.steps // job.total_steps)} % of {_short(job.total_steps)}"


def _short(number: int) -> str:
    """Return ``12000``, ``1.2M``: a number in at most six characters."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


def runs(devices: Iterable[str]) -> Iterator[str]:
    """Yield names of devices, such as ``cuda:0-3`` for four that follow each other."""
    first = last = ""
    for device in devices:
        if first and _follows(last, device):
            last = device
            continue
        if first:
            yield _run(first, last)
        first = last = device
    if first:
        yield _run(first, last)


def _follows(one: str, other: str) -> bool:
    left, right = _NUMBERED.fullmatch(one), _NUMBERED.fullmatch(other)
    return bool(left and right and left[1] == right[1] and int(left[2]) + 1 == int(right[2]))


def _run(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last.rpartition(':')[2]}"
