"""Time limits, and what happens to jobs that exceed them.

A job is late if it reaches no boundary, does not come back to a device, or is on its devices and does not
begin to train. A gang is late if some of its ranks do not come.

A job that is stuck keeps its devices, because its processes may still use them; no other job can be put
there. So it is reported, and either ended or left running. If it is left running, the suspend is called off,
the policy learns that the job still holds its devices, and the job that was to follow can be sent elsewhere.

A gang that is not whole has no device and no state. Only its launcher sees a rank that dies before its Hello.
If the launcher waits for the other ranks, the command never ends. So such a gang fails, whatever its owner
wanted.
"""

from __future__ import annotations

from math import inf

from gpuslice.sched_core.jobs import places
from gpuslice.sched_core.jobs.failures import Kind
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState, Trigger

from . import job_steps
from .events import Notice, Plain
from .rank_processes import RankProcesses
from .state import State

#: How long the ranks of a gang may take to come after the first, unless the owner wants late jobs ended.
GANG_TIMEOUT_S = 300.0


def due_s(job: Gang) -> float:
    """Return when ``job`` will be late with what it is about to do; infinite if it cannot be late."""
    if not job.spec.boundary_timeout_s or job.processes.cut_off:
        return inf
    if job.processes.idle_since_s is not None and job.lease:
        return job.processes.idle_since_s + job.spec.boundary_timeout_s
    if job.lateness.late:
        return inf
    return _since_s(job) + _limit_s(job)


def _limit_s(job: Gang) -> float:
    """Return how many seconds ``job`` may take for what it is about to do."""
    limit_s = job.spec.boundary_timeout_s
    patient = _gathers(job) and not job.spec.kill_when_late
    return max(limit_s, GANG_TIMEOUT_S) if patient else limit_s


def _since_s(job: Gang) -> float:
    """Return since when ``job`` is to do what it is about to do; infinite if it has only to train."""
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
    """Return True if ``job`` has no devices, and some of its ranks are there but not all."""
    waits = job.state in (JobState.QUEUED, JobState.SUSPENDED)
    return waits and job.processes.first_hello_s is not None and not job.ready


def handle_late(state: State, processes: RankProcesses, job: Gang, now: float) -> None:
    """Report that ``job`` is late, and end it or let it go on, as its owner wanted."""
    if job.processes.idle_since_s is not None and job.lease:
        processes.give_up_devices(job, now)
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
    state.order(notice(job, order, now, kill=kill))
    job.history.append((now, f"late: {what}"))
    if kill:
        reason = f"it {what} within {limit_s:g} s"
        job_steps.end(state, job, Trigger.FAIL, reason, now, Kind.INFRASTRUCTURE)
        return
    if places.idles(job) and job.state in (JobState.RUNNING, JobState.SUSPENDING):
        processes.withdraw(job, now)
    if job.state is JobState.SUSPENDING and job_steps.stay(state, job):
        job_steps.call_off(state, job, now)


def notice(job: Gang, order: str, now: float, *, kill: bool) -> Notice:
    """Return the notice that ``job`` did not carry out ``order`` in time, and is ended for it (``kill``)."""
    details: dict[str, Plain] = {
        "order": order,
        "after_s": now - _since_s(job),
        "boundary": max(rank.boundary for rank in job.ranks),
        "missed": job.lateness.missed,
        "then": "kill" if kill else "leave",
    }
    return Notice("late", job.id, details)
