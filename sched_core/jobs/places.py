"""The places of a job's ranks: which process has a place, which ones wait, and when all are free again."""

from __future__ import annotations

from math import inf

from .gang import Gang
from .rank import RankPhase

_BESIDE = "submit trainings that run at the same time as jobs of their own"
_COME = (RankPhase.PARKED, RankPhase.COMING, RankPhase.ON)


def processes_of(job: Gang, number: int) -> list[int]:
    """Return the pids for rank ``number``: of its process, if any, then of those in line or beside it."""
    there = [rank.pid for rank in job.there() if rank.number == number]
    others = (*job.processes.line, *job.processes.beside)
    return [*there, *(hello.pid for hello in others if hello.rank == number)]


def idles(job: Gang) -> bool:
    """Return True if ``job`` has one rank, whose process has connected and has not begun to train."""
    (first, *others) = job.ranks
    return not others and first.phase in _COME and not (first.boundary or first.step)


def free(job: Gang, now: float) -> None:
    """Note that no process has a place of ``job`` until new ones come. The job's progress is kept."""
    job.processes.free(now, job.steps)
    if job.running and now < job.since_s < inf:
        job.progress_from(now)  # the device is its own without a process, too
    job.renew_ranks(len(job.ranks))
    job.asked.forget()
    job.refusals.forget()
    job.book(now)
    job.step_time.suspended()


def obstacle(job: Gang) -> str:
    """Return why ``job`` cannot be suspended, if processes train beside its rank; else an empty string."""
    who = ", ".join(str(hello.pid) for hello in job.processes.beside)
    text = f"at which process {who}, which trains beside {job.ranks[0].pid}, can park; {_BESIDE}"
    return text if who else ""
