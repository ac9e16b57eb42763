"""The places of a job's ranks: which process has one, which ones wait, and when all are free again."""

from __future__ import annotations

from math import inf

from .gang import Gang
from .rank import RankPhase

_BESIDE = "submit trainings that run at the same time as jobs of their own"
_COME = (RankPhase.PARKED, RankPhase.COMING, RankPhase.ON)


def processes_of(job: Gang, number: int) -> list[int]:
    """Return the process that is rank ``number`` now, if there is one, and those in line or beside it."""
    there = [rank.pid for rank in job.there() if rank.number == number]
    others = (*job.processes.line, *job.processes.beside)
    return [*there, *(hello.pid for hello in others if hello.rank == number)]


def idles(job: Gang) -> bool:
    """Return True if the only rank of ``job`` has come and not begun to train."""
    (first, *others) = job.ranks
    return not others and first.phase in _COME and not (first.boundary or first.step)


def free(job: Gang, now: float) -> None:
    """Have no processes, until others come; what those before have done stays the job's own."""
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
