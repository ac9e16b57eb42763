"""When a job that waits is expected to start, as far as that follows from what people have stated.

A moment is only said if it is known: a begin, the end of a pause or a reservation, the pause before a
restart, or the ends of the jobs before it, under ``fifo``, which takes no devices away. Nothing is guessed
from how fast jobs have trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from gpuslice.sched_core.jobs.conditions import followed
from gpuslice.sched_core.jobs.gang import Gang

from .core import Core

NOT_BEFORE, ABOUT, AT_THE_LATEST = "not before", "about", "at the latest"


class ExpectedStart(NamedTuple):
    """A moment on the core's clock, how it is meant (``not before`` ...), and from what it follows."""

    when_s: float
    bound: str
    reason: str


class _End(NamedTuple):
    """The expected end of a job, and the option that says it."""

    when_s: float
    job: str
    option: str


def expected_start(core: Core, job: Gang, now: float) -> ExpectedStart | None:
    """Return when ``job`` is expected to start. Return None if it has devices, or nothing is known."""
    if job.lease or job.state.ended or job.held or job.keep:
        return None
    found = None
    if job.conditions.begin_unix_s:
        when_s = core.state.wall.moment(job.conditions.begin_unix_s)
        found = ExpectedStart(when_s, NOT_BEFORE, "--begin")
    elif job.conditions.after:
        found = _after(core, job, now)
    elif job.shut_out:
        found = _opened(core, job)
    elif not job.command.launched and job.not_before_s > now:
        found = ExpectedStart(job.not_before_s, NOT_BEFORE, "the pause before it is started again")
    elif _waits_in_line(core, job):
        found = _next_in_line(core, job, now)
    return found if found is not None and now < found.when_s < inf else None


def _opened(core: Core, job: Gang) -> ExpectedStart | None:
    """Return when enough devices are open to ``job``, all of whose devices are closed."""
    closed = core.state.closed
    devices = job.home if job.bound else range(len(core.devices))
    opens = sorted(
        closed.opens_unix_s(job, device) if device in job.closed else 0.0
        for device in devices
        if not core.state.nodes.any_silent(core.state.nodes.of((device,)))
    )
    if len(opens) < job.least:
        return None
    return ExpectedStart(core.state.wall.moment(opens[job.least - 1]), NOT_BEFORE, "its devices are closed")


def _keeps_order(core: Core) -> bool:
    """Return True if the policy starts jobs in the order of their arrival and takes no devices away."""
    return core.allocation.planning.policy == "fifo" and not core.allocation.throughput.packs


def _after(core: Core, job: Gang, now: float) -> ExpectedStart | None:
    """Return when all jobs that ``job`` follows have ended, if each has a known end."""
    ends = []
    for one in job.conditions.after:
        other = core.jobs.get(followed(one))
        if other is None or one.endswith(":failed") or not _keeps_order(core):
            return None
        ends.append(_end(other, now))
    return _by(ends)


def _waits_in_line(core: Core, job: Gang) -> bool:
    """Return True if ``job`` is the next one that the policy starts, on any devices."""
    if not _keeps_order(core) or not job.shown or job.running or job.closed or job.within or job.bound:
        return False
    place = (-job.spec.priority, job.number)
    waiting = (one for one in core.allocation.eligibility.eligible.values() if not one.running)
    return all((-one.spec.priority, one.number) >= place for one in waiting)


def _next_in_line(core: Core, job: Gang, now: float) -> ExpectedStart | None:
    """Return when as many devices are free as ``job`` needs, if the ends of the jobs there are known."""
    free: list[_End] = []
    for device in range(len(core.devices)):
        if core.state.nodes.any_silent(core.state.nodes.of((device,))):
            continue
        ends = [_end(other, now) for other in core.state.occupants[device].values()]
        free.append(max(ends, default=_End(now, "", "")))
    free.sort()
    return _by(free[: job.least]) if len(free) >= job.least else None


def _end(job: Gang, now: float) -> _End:
    """Return the end of ``job`` by what its owner stated. Infinite if it has no devices or stated none."""
    ends = [_End(inf, job.id, "")]
    if job.lease and not job.told_to_end:
        if job.spec.expected_s > job.progress_at(now):
            ends.append(_End(now + job.spec.expected_s - job.progress_at(now), job.id, "--duration"))
        if job.spec.time_limit_s:
            limit_s = job.has_had_devices_s(job.spec.time_limit_s) + job.spec.grace_s
            ends.append(_End(limit_s, job.id, "--time-limit"))
    return min(ends)


def _by(ends: Iterable[_End]) -> ExpectedStart:
    """Return the start that follows the last of ``ends``."""
    found = sorted(ends)
    about = any(end.option == "--duration" for end in found)
    reason = ", ".join(dict.fromkeys(f"{end.option} of {end.job}" for end in found if end.option))
    return ExpectedStart(found[-1].when_s, ABOUT if about else AT_THE_LATEST, reason)
