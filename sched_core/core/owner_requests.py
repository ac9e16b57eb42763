"""Requests of the owners of jobs: to submit, cancel, hold, release, move, weigh or requeue a job."""

from __future__ import annotations

from collections import Counter
from math import inf

from gpuslice.config import format_size
from gpuslice.errors import UsageError
from gpuslice.sched_core.allocation.allocation import Allocation
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.conditions import followed
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState, Trigger
from gpuslice.sched_core.lifecycle import restarts, unfit_nodes
from gpuslice.sched_core.lifecycle.events import (
    Adjusted,
    Cancelled,
    Held,
    Kept,
    Moved,
    OwnerRequest,
    Released,
    Requeued,
    Weighted,
)
from gpuslice.sched_core.lifecycle.job_steps import end, lose_state
from gpuslice.sched_core.lifecycle.state import State


def check_submission(state: State, allocation: Allocation, spec: JobSpec) -> None:
    """Refuse a job that could never run on this cluster under this policy.

    Raises
    ------
    UsageError
        If the job asks for more than there is; the message names both.
    """
    there = [device for number, device in enumerate(state.devices) if number not in state.closed.removed]
    if not 1 <= spec.devices <= spec.ranks <= len(there):
        raise UsageError(
            f"job {spec.id} asks for {spec.ranks} devices of {len(there)}",
            "ask for as many as there are",
        )
    largest = max(Counter(device.node for device in there).values())
    if spec.elastic and spec.ranks > largest:
        raise UsageError(
            f"job {spec.id} may have up to {spec.ranks} devices, all on one node; the largest has {largest}",
            "ask for no more than that",
        )
    if spec.guaranteed and not allocation.planning.guarantees:
        raise UsageError(
            f"job {spec.id} wants its deadline guaranteed, which this policy never does",
            "leave out --guaranteed, or start the scheduler with --policy chronus",
        )
    if spec.priority and not allocation.planning.priorities.possible:
        raise UsageError(
            f"job {spec.id} has a priority, and policy {allocation.planning.policy} cannot plan by priority",
            "leave out --priority, or mend the policy so that it can be copied (copy.deepcopy)",
        )
    if unknown := [name for name in map(followed, spec.after) if not allocation.starts.knows(name)]:
        raise UsageError(
            f"job {spec.id} is to start after job {unknown[0]}, and there is no such job or array",
            "submit that one first; `gpuslice ps` lists what there is",
        )
    if spec.begin_unix_s and state.wall.ahead_s is None:
        raise UsageError(f"job {spec.id} is to begin at a time of day, which is not known", "leave it out")
    quota = allocation.quotas.tenants.get(spec.tenant)
    if quota is not None and spec.ranks > quota.most:
        raise UsageError(
            f"job {spec.id} asks for {spec.ranks} devices; the quota of tenant {spec.tenant} is {quota.most}",
            "ask for fewer, or raise the quota with `gpuslice up --quota`",
        )
    most_bytes = max(spec.device_memory_bytes, spec.most_device_memory_bytes)
    if state.device_memory_bytes and most_bytes > state.device_memory_bytes:
        raise UsageError(
            f"job {spec.id} asks for {format_size(most_bytes)} on each device,"
            f" which has {format_size(state.device_memory_bytes)}",
            "ask for less memory, or for more devices",
        )


def apply(state: State, allocation: Allocation, job: Gang, event: OwnerRequest, now: float) -> None:
    """Carry out a request of the owner of ``job``: cancel, hold, release, move, weigh or requeue it.

    Raises
    ------
    IllegalTransitionError
        If the job's present state does not allow it.
    UsageError
        If the request is impossible in any state.
    """
    match event:
        case Cancelled():
            _cancel(state, job, event, now)
        case Held():
            hold(state, job, now)
        case Released():
            _release(state, job, now)
        case Moved():
            _move(state, allocation, job, event, now)
        case Weighted():
            _weigh(allocation, job, event, now)
        case Adjusted():
            _adjust(allocation, job, event, now)
        case Requeued():
            _requeue(state, job, now, fresh=event.fresh)


def _cancel(state: State, job: Gang, event: Cancelled, now: float) -> None:
    if job.may_restart and not job.processes_gone:
        job.given_up = True
        job.history.append((now, f"no further attempt: {event.reason}"))
    else:
        end(state, job, Trigger.CANCEL, event.reason, now)


def hold(state: State, job: Gang, now: float) -> None:
    """Keep ``job`` off all devices until its owner releases it.

    Raises
    ------
    IllegalTransitionError
        If the job has ended, or is held already.
    """
    if job.state.ended or job.held:
        raise job.illegal("suspend by its owner")
    job.held = True
    job.history.append((now, "held by its owner"))
    job.book(now)
    state.reconcile_later(job)


def _release(state: State, job: Gang, now: float) -> None:
    if job.state.ended or not job.held:
        raise job.illegal("resume by its owner")
    job.held = False
    job.book(now)
    job.history.append((now, "released by its owner"))
    state.reconcile_later(job)  # it may not be started yet


def _move(state: State, allocation: Allocation, job: Gang, event: Moved, now: float) -> None:
    if job.state.ended:
        raise job.illegal("migrate by its owner")
    if job.spec.elastic:
        raise UsageError(
            f"job {job.id} may have {job.demand} to {job.spec.ranks} devices, which its policy chooses",
            "submit it with one number of devices to choose them yourself",
        )
    wish = tuple(_device(state, name) for name in event.devices)
    if len(wish) != job.demand or len(set(wish)) != len(wish):
        raise UsageError(
            f"job {job.id} has {job.demand} ranks; {', '.join(event.devices)} are not as many devices",
            "name one device for each rank, each once",
        )
    state.nodes.check_usable(wish)
    unfit_nodes.check(state, job, wish)
    for device in sorted(job.closed.intersection(wish)):
        raise UsageError(state.closed.reason(job, device, now), "name other devices, or wait until then")
    job.history.append((now, f"to be moved to {', '.join(event.devices)}"))
    goals = set(state.nodes.of(wish))  # the request was admitted: they have room by now
    job.relocation.find_room({n: why for n, why in job.relocation.no_room.items() if n not in goals})
    allocation.moves.request(job, wish)
    state.nodes.restrict(job)  # they may be of several nodes


def _weigh(allocation: Allocation, job: Gang, event: Weighted, now: float) -> None:
    if job.state.ended:
        raise job.illegal("weight by its owner")
    if not 0 < event.weight < inf:
        raise UsageError(f"weight {event.weight} is not above 0", "give a positive number")
    job.history.append((now, f"weight {event.weight}"))
    allocation.reweigh(job, event.weight)


def _adjust(allocation: Allocation, job: Gang, event: Adjusted, now: float) -> None:
    wanted = {"weight": event.weight, "priority": event.priority, "time_limit_s": event.time_limit_s}
    changes = {name: value for name, value in wanted.items() if value is not None}
    if job.state.ended:
        raise UsageError(f"job {job.id} has ended", f"start it again: `gpuslice requeue {job.id}`")
    if event.priority and not allocation.planning.priorities.possible:
        raise UsageError(
            f"policy {allocation.planning.policy} cannot plan by priority", "leave out the priority"
        )
    job.history.append((now, ", ".join(f"{name} {value}" for name, value in changes.items())))
    allocation.adjust(job, changes)


def _requeue(state: State, job: Gang, now: float, *, fresh: bool) -> None:
    if not job.state.ended:
        raise UsageError(
            f"job {job.id} has not ended, it is {job.state.value}",
            f"end it first: `gpuslice cancel {job.id}`",
        )
    if not job.processes_gone:
        raise UsageError(
            f"processes of job {job.id} are still ending", f"try again after `gpuslice wait {job.id}`"
        )
    # Only a failed job keeps its snapshots: another attempt might have gone on from them.
    has_state = job.state is JobState.FAILED and not fresh
    restarts.requeue(state, job, now, fresh=fresh)
    if not has_state:
        lose_state(job)


def keep(state: State, event: Kept, now: float) -> None:
    """Take the jobs of ``event`` as far as it says towards being kept, or schedule them again."""
    keep = event.keep
    for job in [state.known(event.job, event)] if event.job else state.jobs.values():
        if not job.state.ended or job.may_restart:
            job.keep_for_later(keep)
            job.history.append((now, f"kept: {keep.value}" if keep else "kept no longer"))
            job.book(now)
            state.reconcile_later(job)


def _device(state: State, name: str) -> int:
    names = {str(state.devices[number]): number for number in state.present}
    if name not in names:
        raise UsageError(f"there is no device {name!r} here", f"choose of {', '.join(names)}")
    return names[name]
