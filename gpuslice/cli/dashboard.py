"""The picture of ``gpuslice top``: devices, queues and jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuslice.verbs import DeviceInfo, JobInfo, SchedulerStatus, SliceInfo

from . import device_remarks, job_table, node_table, tables
from .text_width import one_line

#: What the strips show, up to now, and in how many characters.
WINDOW_S = 30.0
STRIP = 30
_BAR = 16
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red")
_STATES = {"running": "green", "failed": "red", "cancelled": "red", "succeeded": "dim"}
#: Lines of the picture that are not jobs or devices.
_FRAME = 8
_STRIP = f"LAST {WINDOW_S:.0f} S"
#: What is told of jobs, and from which width of the screen on.
_COLUMNS = {
    "JOB": 0,
    "STATE": 0,
    "PROGRESS": 100,
    "SHARES": 180,
    "STEPS": 0,
    "STEPS/S": 0,
    "SERVICE": 100,
    "SLICES": 0,
    "BLACKOUT": 150,
    "SWITCH": 190,
    "ETA": 0,
    "DEADLINE": 170,
    "WHY": 0,
    _STRIP: 130,
}


def picture(status: SchedulerStatus, width: int, height: int, notice: str = "") -> RenderableType:
    """Return the picture of ``status``, in at most ``height`` lines where that is possible.

    Parameters
    ----------
    width
        Number of columns of the screen.
    notice
        Text for the first line.
    """
    colours = {job.id: _COLOURS[index % len(_COLOURS)] for index, job in enumerate(status.jobs)}
    queues = _queues(status.jobs, colours)
    room = max(1, height - _FRAME - len(status.devices) - queues.row_count)
    return Group(
        _headline(status, notice),
        *(Text(line, style="red") for line in node_table.remarks(status.nodes, only_bad=True)),
        "",
        _devices(status, colours),
        "",
        queues,
        "",
        _jobs(status, colours, room, width),
    )


def _headline(status: SchedulerStatus, notice: str) -> Text:
    ended = sum(job.ended for job in status.jobs)
    on = sum(bool(job.devices) and not job.ended for job in status.jobs)
    line = Text.assemble(
        ("gpuslice", "bold"),
        f"  {status.policy}  {on} on devices, {len(status.jobs) - on - ended} waiting, {ended} ended",
        ("  q ends", "dim"),
    )
    if notice:
        line.append(f"  {notice}", "bold red")
    return line


def _devices(status: SchedulerStatus, colours: dict[str, str]) -> Table:
    table, now_unix_s = _table("DEVICE", _STRIP, "HELD BY"), time.time()
    states = {job.id: job.state for job in status.jobs}
    for device in status.devices:
        holders = Text(", ").join(
            Text.assemble((job, colours.get(job, "")), f" {states.get(job, '')}") for job in device.jobs
        )
        closed = device_remarks.closed(device, now_unix_s)
        if not holders:
            holders = Text(closed or "free", "dim")
        elif closed:
            holders.append(f" ({closed})", "dim")
        table.add_row(device.name, _device_strip(device, status, colours), holders)
    return table


def _device_strip(device: DeviceInfo, status: SchedulerStatus, colours: dict[str, str]) -> Text:
    """Return one character per stretch of time: for how much of it the device was in use."""
    strip = Text()
    since_s = status.now_s - WINDOW_S
    slices = {
        job.id: [one for one in job.recent if device.name in one.devices and not _over(one, since_s)]
        for job in status.jobs
    }
    held = {job: found for job, found in slices.items() if found}
    for begin_s, end_s in _columns(status.now_s):
        shares = {job: _share(found, begin_s, end_s) for job, found in held.items()}
        most = max(shares, key=lambda job: shares[job], default="")
        strip.append(_height(min(1.0, sum(shares.values()))), colours.get(most, ""))
    return strip


def _queues(jobs: Sequence[JobInfo], colours: dict[str, str]) -> Table:
    """Return the table of queues: the jobs of each, on devices and waiting."""
    table = _table("QUEUE", "ON DEVICES", "WAITING")
    present = [job for job in jobs if not job.ended]
    levels = sorted({job.level for job in present}, key=lambda level: -1 if level is None else level)
    for level in levels:
        there = [job for job in present if job.level == level]
        table.add_row(
            "-" if level is None else str(level),
            _names([job for job in there if job.devices], colours),
            _names([job for job in there if not job.devices], colours),
        )
    return table


def _names(jobs: Sequence[JobInfo], colours: dict[str, str]) -> Text:
    return Text(" ").join(Text(f"{job.id} (held)" if job.held else job.id, colours[job.id]) for job in jobs)


def _jobs(status: SchedulerStatus, colours: dict[str, str], room: int, width: int) -> Table:
    """Return the table of jobs: those on devices first, ended ones last, with the columns that fit."""
    shown = [column for column, least in _COLUMNS.items() if width >= least]
    table = _table(*shown)
    ordered = sorted(status.jobs, key=lambda job: (job.ended, not job.devices))
    for job in ordered[:room]:
        cells: dict[str, RenderableType] = {
            "JOB": Text(job.id, colours[job.id]),
            "STATE": Text(job.state, _STATES.get(job.state, "")),
            "PROGRESS": _progress(job),
            "SHARES": tables.shares(job),
            "STEPS": tables.steps(job),
            "STEPS/S": tables.number(job.steps_per_s),
            "SERVICE": tables.duration(job.service_s),
            "SLICES": str(job.slices),
            "BLACKOUT": tables.blackout(job),
            "SWITCH": tables.switch(job),
            "ETA": tables.duration(job.eta_s),
            "DEADLINE": tables.deadline(job),
            "WHY": Text(one_line(job_table.reason(job)), no_wrap=True, overflow="ellipsis"),
            _STRIP: _job_strip(job, status.now_s, colours[job.id]),
        }
        table.add_row(*(cells[column] for column in shown))
    if len(ordered) > room:
        table.add_row(Text(f"and {len(ordered) - room} more", "dim"))
    return table


def _progress(job: JobInfo) -> RenderableType:
    """Return a progress bar. Return a dash if the number of steps is not known."""
    if job.total_steps is None:
        return Text("-", "dim")
    return ProgressBar(job.total_steps, min(job.steps, job.total_steps), width=_BAR)


def _job_strip(job: JobInfo, now_s: float, colour: str) -> Text:
    """Return one character per stretch of time: for how much of it the job had devices."""
    heights = (_height(_share(job.recent, begin_s, end_s)) for begin_s, end_s in _columns(now_s))
    return Text("".join(heights), colour)


def _columns(now_s: float) -> Iterable[tuple[float, float]]:
    length_s = WINDOW_S / STRIP
    return ((now_s - (STRIP - n) * length_s, now_s - (STRIP - n - 1) * length_s) for n in range(STRIP))


def _share(slices: Iterable[SliceInfo], begin_s: float, end_s: float) -> float:
    """Return the part of the time from ``begin_s`` to ``end_s`` that the slices fill, 0 to 1."""
    filled_s = 0.0
    for one in slices:
        until_s = end_s if one.until_s is None else min(one.until_s, end_s)
        filled_s += max(0.0, until_s - max(one.since_s, begin_s))
    return filled_s / (end_s - begin_s)


def _over(one: SliceInfo, since_s: float) -> bool:
    return one.until_s is not None and one.until_s <= since_s


def _height(share: float) -> str:
    return _HEIGHTS[round(min(1.0, share) * (len(_HEIGHTS) - 1))]


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        # Columns that may wrap become narrower first; that of reasons is then cut.
        table.add_column(column, no_wrap=column != "WHY")
    return table
