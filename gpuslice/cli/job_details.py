"""What ``gpuslice show`` says of a job: one labelled line a matter, without those that do not apply."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from datetime import datetime

from gpuslice.config import format_size
from gpuslice.verbs import AttemptInfo, EndInfo, JobInfo

from . import tables
from .text_width import one_line

_NONE = ("", "-")


def text(job: JobInfo, now_s: float = 0.0, output: Mapping[str, bytes] | None = None) -> str:
    """Return the page that ``gpuslice show`` prints: each known fact about ``job`` with its label.

    Parameters
    ----------
    now_s
        The time of the scheduler's clock.
    output
        The last lines that the job wrote, by stream.
    """
    said = [(label, one_line(value)) for label, value in _labelled(job) if value not in _NONE]
    said += [(f"attempt {one.number}", one_line(_attempt(one, now_s))) for one in job.attempts]
    widest = max(len(label) for label, _ in said)
    lines = [f"{label:<{widest}}  {value}" for label, value in said]
    for stream, written in (output or {}).items():
        if written:
            lines += ["", f"its last lines on {stream}:"]
            lines += [f"  {one_line(line)}" for line in written.decode(errors="replace").splitlines()]
    return "\n".join(lines)


def _attempt(one: AttemptInfo, now_s: float) -> str:
    """Return when an attempt began, how long it took and how it ended, in words."""
    words = [f"began {tables.duration(max(0.0, now_s - one.since_s))} ago"]
    if one.until_s is not None:
        words.append(f"took {tables.duration(one.until_s - one.since_s)}")
    if one.exit_code is not None:
        words.append(f"exit code {one.exit_code}")
    return f"{', '.join(words)}{f': {one.failure}' if one.failure else ''}"


def _at_end(one: EndInfo) -> str:
    """Return how far a command or message has come that a job is followed by, in words."""
    if one.state == "waits":
        return "when it has ended"
    tries = "" if one.tries == 1 else f" after {one.tries} tries"
    if not one.reason:
        return f"done{tries}" if one.state == "done" else "under way"
    if one.again_s is None:
        return f"given up{tries}: {one.reason}"
    return f"failed{tries}, tried again in {tables.duration(one.again_s)}: {one.reason}"


def _expected_end(job: JobInfo) -> str:
    if job.eta_s is None:
        return ""
    return f"in {tables.duration(job.eta_s)}, {_clock(time.time() + job.eta_s)}, at its pace so far"


def _expected_start(job: JobInfo) -> str:
    if job.start is None:
        return ""
    moment = f"{_clock(time.time() + job.start.in_s)}, in {tables.duration(job.start.in_s)}"
    if job.start.bound == "at the latest":
        return f"{moment} at the latest ({job.start.reason})"
    return f"{job.start.bound} {moment} ({job.start.reason})"


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).isoformat(sep=" ", timespec="minutes")


def _labelled(job: JobInfo) -> Iterator[tuple[str, str]]:
    yield "job", job.id
    yield "user", job.tenant
    yield "state", tables.state(job)
    yield "why", job.why or ""
    yield "reason", job.reason
    yield "exit", tables.ending(job)
    yield "command", shlex.join(job.command)
    yield "directory", job.directory
    for one in job.at_end:
        yield one.what.replace("_", " "), _at_end(one)
    yield "array", job.array or ""
    yield "after", ", ".join(job.after)
    yield "expected start", _expected_start(job)
    yield "devices", _devices(job)
    yield "shares", tables.shares(job)
    yield "progress", _progress(job)
    yield "time", _times(job)
    yield "waited", tables.waited(job)
    yield "expected end", _expected_end(job)
    yield "time limit", tables.duration(job.time_limit_s)
    yield "deadline", tables.deadline(job)
    yield "slices", f"{job.slices}; suspends: {job.suspends}, moves: {job.migrations}"
    yield "blackout", tables.blackout(job)
    yield "last switch", tables.switch(job)
    yield "copy", tables.copy(job)
    yield "memory", _memory(job)
    yield "weight", f"{job.weight:g}"
    yield "queue", "" if job.level is None else str(job.level)
    yield "trial", job.trial or ""
    yield "restarts", f"{job.restarts} of {job.max_restarts}" if job.max_restarts else ""
    yield "tensor skew", "" if job.skew is None else f"{job.skew:.2f}"


def _devices(job: JobInfo) -> str:
    asked = str(job.demand) if job.most_devices is None else f"{job.demand} to {job.most_devices}"
    return f"{', '.join(job.devices) or 'none now'} ({asked} asked for)"


def _progress(job: JobInfo) -> str:
    said = f"{tables.steps(job)} steps"
    return said if job.steps_per_s is None else f"{said}, {tables.number(job.steps_per_s)} a second"


def _times(job: JobInfo) -> str:
    """Return where the job's time has gone, in words."""
    spent = {
        "trained": job.executed_s,
        "set up": job.setup_s,
        "switched": job.switching_s,
        "waited": job.waited_s,
        "held": job.held_s,
    }
    parts = [f"{word} {tables.duration(seconds)}" for word, seconds in spent.items() if seconds]
    return f"{', '.join(parts) or 'none'}; {tables.duration(job.age_s)} since its submission"


def _memory(job: JobInfo) -> str:
    parts = []
    if job.memory_bytes is not None:
        parts.append(f"{format_size(job.memory_bytes)} on each device at most")
    if job.peak_bytes is not None:
        parts.append(f"{format_size(job.peak_bytes)} used at most")
    return ", ".join(parts)
