"""Jobs that do not carry an order out in time: they reach no boundary, or do not come back to a device;
jobs that are on their devices and never begin to train; and gangs of which some ranks never come.

A job that is stuck keeps its devices, because its processes may still use them; nobody can be put there. So
it is reported, and either ended or left running: then the suspend is called off, the policy learns that the
job still holds its devices, and whoever was to follow can be sent elsewhere.

A gang that is not whole has no device and no state. A rank that dies before its Hello is seen by its launcher
alone, and if that waits for the others nobody ever ends; so such a gang fails, whatever its owner wanted.
"""

from __future__ import annotations

from math import inf

from gpuslice.sched_core.jobs import places
from gpuslice.sched_core.jobs.failures import Kind
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState, Trigger

from .contract import CoreContract
from .events import Notice, Plain

#: How long the ranks of a gang may take to come after the first, if none is to be ended sooner.
GANG_TIMEOUT_S = 300.0


def due_s(job: Gang) -> float:
    """When ``job`` will be late, if it has not done by then what it is about to do; infinite if never."""
    if not job.spec.boundary_timeout_s:
        return inf
    if job.processes.idle_since_s is not None and job.lease:
        return job.processes.idle_since_s + job.spec.boundary_timeout_s
    if job.lateness.late:
        return inf
    return _since_s(job) + _limit_s(job)


def _limit_s(job: Gang) -> float:
    """How long that may take."""
    limit_s = job.spec.boundary_timeout_s
    patient = _gathers(job) and not job.spec.kill_when_late
    return max(limit_s, GANG_TIMEOUT_S) if patient else limit_s


def _since_s(job: Gang) -> float:
    """Since when ``job`` is to do what it is about to do; infinite if that is nothing but training."""
    if job.state in IN_TRANSIT:
        return job.lateness.told_s
    if _gathers(job):
        assert job.processes.first_hello_s is not None
        return job.processes.first_hello_s
    is_to_begin = job.state is JobState.RUNNING and job.lease == job.wanted
    if not is_to_begin or job.borrowed or job.setup_since_s is None:
        return inf  # (a trial has a limit of its own)
    return job.setup_since_s


def _gathers(job: Gang) -> bool:
    """Whether some ranks of ``job``, which has no devices, are there and others have still to come."""
    waits = job.state in (JobState.QUEUED, JobState.SUSPENDED)
    return waits and job.processes.first_hello_s is not None and not job.ready


def handle_late(core: CoreContract, job: Gang, now: float) -> None:
    """Report ``job``, which is late, and do with it what its owner wanted."""
    if job.processes.idle_since_s is not None and job.lease:
        core.processes.give_up_devices(job, now)
        return
    limit_s = _limit_s(job)
    job.lateness.report()
    stopping = job.state is JobState.SUSPENDING
    kill = job.spec.kill_when_late
    if _gathers(job):
        absent = ", ".join(str(rank.number) for rank in job.present(RankPhase.ABSENT))
        order, what, kill = "start", f"did not start rank {absent}", True
    elif job.state is JobState.RUNNING:
        order, what = "begin", "did not begin to train"
    else:
        order = "suspend" if stopping else "resume"
        what = "reached no boundary" if stopping else "did not come back to its devices"
    core.order(notice(job, order, now, kill=kill))
    job.history.append((now, f"late: {what}"))
    if kill:
        reason = f"it {what} within {limit_s:g} s"
        core.end(job, Trigger.FAIL, reason, now, Kind.INFRASTRUCTURE)
        return
    if places.idles(job) and job.state in (JobState.RUNNING, JobState.SUSPENDING):
        core.processes.withdraw(job, now)
    if job.state is JobState.SUSPENDING and plan_with_present(core, job, now):
        core.reports.call_off(job, now)


def plan_with_present(core: CoreContract, job: Gang, now: float) -> bool:
    """Have the policy, or whoever is to be tried, plan with what ``job`` holds and does not leave.

    Return False if it is to leave all the same: its owner wants it off, or it has no part of the quota.
    """
    if job.lent:
        core.trials.avoid(job, now)
    elif core.planning.knows(job):
        core.planning.keep_current(job, now)
    else:
        return False
    return True


def notice(job: Gang, order: str, now: float, *, kill: bool) -> Notice:
    """What to say of ``job``, which did not carry ``order`` out in time, and whether it is ended for it."""
    details: dict[str, Plain] = {
        "order": order,
        "after_s": now - _since_s(job),
        "boundary": max(rank.boundary for rank in job.ranks),
        "missed": job.lateness.missed,
        "then": "kill" if kill else "leave",
    }
    return Notice("late", job.id, details)
