"""Tables for people: aligned and coloured on a terminal, separated by tabs elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gpuslice.sched_core.jobs.states import JobState
from gpuslice.verbs import JobInfo

from .text_width import one_line, padded, width

Row = tuple[str, ...]

_COLUMNS = (
    "JOB",
    "USER",
    "STATE",
    "DEVICES",
    "SHARES",
    "STEPS",
    "STEPS/S",
    "SERVICE",
    "WAITED",
    "QUEUE",
    "SLICES",
    "BLACKOUT",
    "SWITCH",
    "ETA",
    "DEADLINE",
    "COPY",
    "EXIT",
    "WHY",
)
_STATE = _COLUMNS.index("STATE")
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
#: By the first word of the state; the terminal's own colours.
_COLOURS = {"running": "\x1b[32m", "failed": "\x1b[31m", "cancelled": "\x1b[31m", "succeeded": "\x1b[2m"}


def jobs(found: Sequence[JobInfo]) -> list[Row]:
    """Return the table of all columns about the jobs, header first, live jobs before ended ones."""
    return [_COLUMNS, *map(_row, live_first(found))]


def live_first(found: Sequence[JobInfo]) -> list[JobInfo]:
    """Return the jobs in order of submission, those that have ended at the end."""
    return sorted(found, key=lambda job: job.ended)


def show(table: Sequence[Row]) -> None:
    """Print ``table``."""
    if not sys.stdout.isatty():
        print("\n".join("\t".join(row) for row in table), flush=True)
        return
    widths = [max(width(row[column]) for row in table) for column in range(len(table[0]))]
    print_lines([[padded(cell, wide) for cell, wide in zip(row, widths, strict=True)] for row in table])


def print_lines(lines: Sequence[list[str]], *, state: int = _STATE) -> None:
    """Print the lines of a table, header first; in colours on a terminal, by the column ``state``."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for number, cells in enumerate(lines):
        shown = _coloured(cells, state, header=number == 0) if coloured else cells
        print("  ".join(shown).rstrip())
    sys.stdout.flush()


def _coloured(cells: list[str], state: int, *, header: bool) -> list[str]:
    if header:
        return [f"{_BOLD}{cell}{_PLAIN}" for cell in cells]
    colour = _COLOURS.get(cells[state].split()[0].rstrip(","))
    return [f"{colour}{cell}{_PLAIN}" if colour and n == state else cell for n, cell in enumerate(cells)]


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """Return a number with its unit. Return ``-`` if there is none."""
    return "-" if value is None else f"{value:.{digits}f}{unit and ' ' + unit}"


def duration(seconds: float | None) -> str:
    """Return a time for people: ``41.5 s``, ``3 min``, ``1.2 h``, ``4.2 d``; ``-`` if there is none."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 360_000 else f"{seconds / 86400:.1f} d"


def blackout(job: JobInfo) -> str:
    """Return the total and the mean time that a job has lost to switches."""
    if job.blackout_mean_s is None:
        return "-"
    return f"{job.blackout_s:.2f} s ({job.blackout_mean_s * 1e3:.0f} ms)"


def switch(job: JobInfo) -> str:
    """Return what the last switch of a job cost, and what was predicted."""
    if job.switch_s is None:
        return "-"
    predicted = "-" if job.switch_predicted_s is None else f"{job.switch_predicted_s * 1e3:.0f} ms"
    return f"{job.switch_s * 1e3:.0f} ms (of {predicted})"


def waited(job: JobInfo) -> str:
    """Return how long a job waited, and in brackets its fair-share delay and its fragmentation delay."""
    if not job.waited_s:
        return "-"
    return f"{job.waited_s:.1f} s ({job.fair_share_delay_s:.1f}/{job.fragmentation_delay_s:.1f})"


def state(job: JobInfo) -> str:
    """Return the state of a job, and what is unusual about it."""
    words = [job.state]
    ended = JobState(job.state).ended
    if job.held and not ended:
        words.append("held")
    if job.moving_to and not ended:
        words.append(f"to {','.join(job.moving_to)}")
    if job.missed_boundaries:
        words.append(f"late {job.missed_boundaries}x")
    if job.stuck:
        words.append(f"no boundary {job.stuck}")
    if job.unleased:
        words.append(f"{job.unleased} without a lease")
    if job.processes:
        words.append(job.processes)
    if job.trial in ("waiting", "running"):
        words.append("trial")
    if job.restarts:
        words.append(f"restart {job.restarts}/{job.max_restarts}")
    return ", ".join(words)


def devices(job: JobInfo) -> str:
    """Return the devices of a job; of an elastic job also the least and most that it may have."""
    words = ",".join(job.devices) or "-"
    return words if job.most_devices is None else f"{words} ({job.demand}:{job.most_devices})"


def shares(job: JobInfo) -> str:
    """Return the jobs that share its devices, and how many times as long its steps take, if known."""
    if not job.shares_with:
        return "-"
    words = f"with {','.join(job.shares_with)}"
    if job.slowdown is None or job.slowdown_interval is None:
        return words
    low, high = job.slowdown_interval
    return f"{words}, {job.slowdown:.2f}x ({low:.2f}-{high:.2f})"


def steps(job: JobInfo) -> str:
    """Return the steps that a job has made, and of how many if that is known."""
    return str(job.steps) if job.total_steps is None else f"{job.steps}/{job.total_steps}"


def deadline(job: JobInfo) -> str:
    """Return the time to a job's deadline, or that it was met or missed; and if it is guaranteed."""
    if job.deadline_s is None:
        return "-"
    left_s = job.deadline_s - job.age_s
    words = ["missed"] if job.deadline_missed else ["met" if job.state == "succeeded" else duration(left_s)]
    if job.guaranteed is not None:
        words.append("guaranteed" if job.guaranteed else "best effort")
    return ", ".join(words)


def copy(job: JobInfo) -> str:
    """Return where the newest copy of a job's state is on another node, and how old that is."""
    return "-" if job.copy_on is None else f"{job.copy_on}, {duration(job.copy_age_s)} old"


def ending(job: JobInfo) -> str:
    """Return the exit code and the class of a failure. Return ``-`` before there is any."""
    words = ["-" if job.exit_code is None else str(job.exit_code), job.failure or ""]
    return " ".join(word for word in words if word)


def _row(job: JobInfo) -> Row:
    return (
        job.id,
        one_line(job.tenant) or "-",
        state(job),
        devices(job),
        shares(job),
        steps(job),
        number(job.steps_per_s),
        number(job.service_s, 1, "s"),
        waited(job),
        "-" if job.level is None else str(job.level),
        str(job.slices),
        blackout(job),
        switch(job),
        duration(job.eta_s),
        deadline(job),
        copy(job),
        ending(job),
        one_line(job.why or job.reason) or "-",
    )
