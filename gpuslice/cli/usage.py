"""What jobs have run and how long they had devices, counted from a scheduler's journal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path

import msgspec

from gpuslice.daemon.replay import JournalReplay
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.journal.wall_clock import WallClock
from gpuslice.sched_core.live.job_history import JobHistory, Phase


class JobUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as ``history --json`` prints it (docs/json.md). Times are in seconds since 1970."""

    id: str
    tenant: str
    array: str | None
    state: str
    submitted_unix_s: float | None
    ended_unix_s: float | None
    device_hours: float
    attempts: int
    exit_code: int | None
    failure: str | None
    reason: str


class UserUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one user, and the time that they had devices, times the number of these."""

    tenant: str
    jobs: int
    succeeded: int
    failed: int
    cancelled: int
    device_hours: float


def read(path: Path, since_unix_s: float = -inf, now_s: float | None = None) -> list[JobUsage]:
    """Return the jobs of the journal at ``path`` that have not ended before ``since_unix_s``.

    Only the time on devices after that moment is counted, up to ``now_s`` by the scheduler's clock. None: up
    to the last event.
    """
    with JournalReplay(path) as replay:
        history, last_s = JobHistory(replay.core), 0.0
        phases: list[Phase] = []
        for event, last_s, commands in replay.advance():
            phases += history.note(event, last_s, commands)
        phases += history.open_phases(max(last_s, now_s or 0.0))
        clock = replay.journal.wall_clock()
        seconds: defaultdict[str, float] = defaultdict(float)
        for phase in phases:
            seconds[phase.job] += _device_seconds(phase, clock, since_unix_s)
        found = [_usage(job, clock, seconds[name]) for name, job in replay.core.jobs.items()]
    return [one for one in found if one.ended_unix_s is None or one.ended_unix_s >= since_unix_s]


def by_user(jobs: Sequence[JobUsage]) -> list[UserUsage]:
    """Return the sums of each user, the one with most device hours first."""
    users: dict[str, list[JobUsage]] = {}
    for job in jobs:
        users.setdefault(job.tenant, []).append(job)
    found = [_user(tenant, ours) for tenant, ours in users.items()]
    return sorted(found, key=lambda user: -user.device_hours)


def _user(tenant: str, jobs: Sequence[JobUsage]) -> UserUsage:
    states = Counter(job.state for job in jobs)
    return UserUsage(
        tenant=tenant,
        jobs=len(jobs),
        succeeded=states["succeeded"],
        failed=states["failed"],
        cancelled=states["cancelled"],
        device_hours=sum(job.device_hours for job in jobs),
    )


def _device_seconds(phase: Phase, clock: WallClock, since_unix_s: float) -> float:
    """Return the time on devices of ``phase`` after ``since_unix_s``, times the number of devices."""
    if not phase.devices or phase.until_s is None:
        return 0.0
    until_unix_s = clock.unix_s(phase.until_s)
    lasted_s = phase.until_s - phase.since_s
    if until_unix_s is not None:
        lasted_s = min(lasted_s, until_unix_s - since_unix_s)
    return max(0.0, lasted_s) * len(phase.devices)


def _usage(job: Gang, clock: WallClock, device_s: float) -> JobUsage:
    ended_s = job.verdict.ended_s
    return JobUsage(
        id=job.id,
        tenant=job.spec.tenant,
        array=job.spec.array or None,
        state=job.state.value,
        submitted_unix_s=clock.unix_s(job.spec.submit_s),
        ended_unix_s=None if ended_s is None else clock.unix_s(ended_s),
        device_hours=device_s / 3600.0,
        attempts=job.attempt + job.command.launched,
        exit_code=job.command.exit_code,
        failure=job.verdict.failure or None,
        reason=job.verdict.reason,
    )
