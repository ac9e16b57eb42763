"""Describe the jobs that are kept while no scheduler runs, and take them over into a new core."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite

import msgspec

from gpuslice.errors import UsageError
from gpuslice.sched_core.allocation.allocation import Allocation
from gpuslice.sched_core.jobs.closed_devices import Reservation
from gpuslice.sched_core.jobs.conditions import followed
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.kept import KeptJob, KeptJobs, KeptPause, KeptReservation, Tally
from gpuslice.sched_core.lifecycle.events import Notice, TakenOver
from gpuslice.sched_core.lifecycle.state import State

from . import device_requests
from .owner_requests import check_submission


def describe(state: State, now: float) -> KeptJobs:
    """Return all jobs that have not ended, and what is closed. The jobs are kept: none has a process."""
    names, closed = tuple(map(str, state.devices)), state.closed
    return KeptJobs(
        jobs=tuple(_described(job, names, now) for job in state.jobs.values() if not job.state.ended),
        paused=tuple(
            KeptPause(names[device], None if until_s == inf else until_s)
            for device, until_s in closed.paused.items()
        ),
        drained=tuple(names[device] for device in sorted(closed.drained)),
        reservations=tuple(
            KeptReservation(
                one.name,
                tuple(names[device] for device in one.devices),
                one.begin_unix_s,
                one.end_unix_s,
                one.tenant,
            )
            for one in closed.reservations
        ),
        reserved=closed.made,
    )


def _described(job: Gang, names: tuple[str, ...], now: float) -> KeptJob:
    exact = {name: getattr(job, name) for name in Tally.__struct_fields__}
    settled = {
        "relaunches": job.attempt - job.failures,
        "waited_s": job.without_devices_at(now),
        "held_s": job.held_at(now),
        "since_s": job.since_s if isfinite(job.since_s) else now,
    }
    conditions = job.conditions
    spec = msgspec.structs.replace(job.spec, begin_unix_s=conditions.begin_unix_s, after=conditions.after)
    return KeptJob(
        spec=spec,
        program=job.program,
        tally=Tally(**{**exact, **settled}),
        kept_s=now,
        begun=job.entry.had,
        steps=job.steps_so_far,
        state_bytes=job.relocation.state_bytes,
        keepers=len(job.state_nodes),
        devices=tuple(names[device] for device in job.last_lease),
        anew=job.command.anew,
        missed=job.lateness.missed,
        reason=job.verdict.reason,
        failure=job.verdict.failure,
    )


def take_over(state: State, allocation: Allocation, event: TakenOver, now: float) -> None:
    """Take the jobs of ``event`` over. They are kept until a ``Kept`` has them scheduled again.

    Raises
    ------
    UsageError
        If one of them could never run here, or there are jobs already; nothing was changed.
    """
    kept = event.kept
    _check(state, allocation, kept)
    timed = any(pause.until_unix_s for pause in kept.paused) or kept.reservations
    if timed or any(one.spec.begin_unix_s for one in kept.jobs):
        state.closed.tell_time(event.unix_s, now)
    numbers = {str(device): number for number, device in enumerate(state.devices)}
    own = state.nodes.own
    for one in kept.jobs:
        last = tuple(numbers[name] for name in one.devices if name in numbers)
        job = Gang(
            one.spec,
            len(state.jobs),
            one.program,
            kept=one,
            last_lease=last if len(last) == len(one.devices) else (),
            state_nodes=() if own is None else (own,) * one.keepers,
        )
        state.jobs[one.spec.id] = job
        job.history.append((now, "taken over from an earlier scheduler"))
    for job in state.jobs.values():
        allocation.enter(job, now)
    _close_devices(state, kept, numbers)
    device_requests.expire(state, now)
    allocation.use_open_devices(now)


def _check(state: State, allocation: Allocation, kept: KeptJobs) -> None:
    if state.jobs:
        raise UsageError("there are jobs already", "only a scheduler without jobs can take others over")
    known = {name for one in kept.jobs for name in (one.spec.id, one.spec.array)}
    for one in kept.jobs:
        # The other jobs that it follows are not there yet, and the time of day may not be known yet.
        spec = msgspec.structs.replace(one.spec, after=(), begin_unix_s=0.0)
        check_submission(state, allocation, spec)
        if one.keepers and state.nodes.own is None:
            raise UsageError(
                f"the state of job {one.spec.id} is on this machine, and none of the devices is",
                "name a device of this machine, too",
            )
        if unknown := [name for name in map(followed, one.spec.after) if name not in known]:
            raise UsageError(
                f"job {one.spec.id} is to start after job {unknown[0]}, which is not among the kept jobs",
                "start the scheduler with the options that it had",
            )


def _close_devices(state: State, kept: KeptJobs, numbers: dict[str, int]) -> None:
    """Pause, drain and reserve the devices that there still are. Send a notice of the others."""

    def there(names: Iterable[str], what: str) -> tuple[int, ...]:
        gone = [name for name in names if name not in numbers]
        if gone:
            state.order(Notice("not_taken_over", details={"what": what, "devices": ",".join(gone)}))
        return tuple(numbers[name] for name in names if name in numbers)

    closed = state.closed
    for pause in kept.paused:
        closed.pause(
            there((pause.device,), "pause"), inf if pause.until_unix_s is None else pause.until_unix_s
        )
    closed.drain(there(kept.drained, "drain"))
    for one in kept.reservations:
        if devices := there(one.devices, f"reservation {one.name}"):
            closed.reserve(Reservation(one.name, devices, one.begin_unix_s, one.end_unix_s, one.tenant))
    closed.count_from(kept.reserved)
