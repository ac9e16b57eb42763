"""Check what is said of a job's ranks, by the tables, before anything of it is written.

Epochs fence the orders to ranks and their answers. Attempts fence processes: what is said of an earlier
attempt of a job is known, and changes nothing.
"""

from __future__ import annotations

from gpuslice.sched_core.jobs import places
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import Rank, RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.wire import (
    Bye,
    FromAgent,
    Hello,
    Overshot,
    Profiled,
    Progress,
    Refused,
    Resumed,
    Suspended,
    Withdrawn,
)

from .rank_orders import NEVER
from .tables import RULES, Answer, If, Report

_KINDS: dict[type[FromAgent], Report] = {
    Progress: Report.PROGRESS,
    Profiled: Report.PROFILED,
    Resumed: Report.RESUMED,
    Suspended: Report.SUSPENDED,
    Overshot: Report.OVERSHOT,
    Withdrawn: Report.WITHDRAWN,
    Bye: Report.BYE,
}
_RUNS = (RankPhase.PARKED, RankPhase.COMING, RankPhase.ON)


def is_news(job: Gang, number: int, message: FromAgent) -> bool:
    """Return True if something follows from ``message`` of rank ``number``.

    Raises
    ------
    IllegalTransitionError
        If that rank cannot have said this now; nothing was changed.
    """
    what = f"{type(message).__name__} of rank {number}"
    if isinstance(message, Hello) and is_past(job, message.attempt, what):
        return False  # the shell ends that process
    if not 0 <= number < len(job.ranks):
        raise job.illegal(what)
    if job.state.ended:
        return False
    rank = job.ranks[number]
    report = report_of(job, rank, message)
    answer = answer_to(job, rank, report, message)
    if isinstance(message, Hello) and (not job.command.launched or message.world_size != len(job.ranks)):
        answer = Answer.IMPOSSIBLE
    if answer is Answer.IMPOSSIBLE:
        raise job.illegal(f"{what} ({rank.phase.value}) {_details(message)}")
    return answer is Answer.NEWS


def is_news_of_end(job: Gang, number: int, pid: int, attempt: int | None) -> bool:
    """Return True if something follows from the end of process ``pid`` of rank ``number``.

    Raises
    ------
    IllegalTransitionError
        If the rank had no process; nothing was changed.
    """
    if is_past(job, attempt, f"end of rank {number}"):
        return False
    if not 0 <= number < len(job.ranks):
        raise job.illegal(f"end of rank {number}")
    rank = job.ranks[number]
    report = Report.OTHER_GONE if pid and pid != rank.pid else Report.GONE
    answer = answer_to(job, rank, report, None)
    if answer is Answer.IMPOSSIBLE:
        raise job.illegal(f"end of rank {number}, which is {rank.phase.value}")
    return answer is Answer.NEWS


def is_news_of_exit(job: Gang, code: int, attempt: int | None) -> bool:
    """Return True if something follows from the end of the command of ``attempt``, with exit code ``code``.

    Raises
    ------
    IllegalTransitionError
        If the command was not started, or has ended before; nothing was changed.
    """
    if is_past(job, attempt, "an exit"):
        return False
    if not job.command.runs:
        raise job.illegal(f"second exit with code {code}")
    return True


def _details(message: FromAgent) -> str:
    if isinstance(message, Hello):
        return f"with epoch {message.epoch}, process {message.pid} of {message.world_size} ranks"
    return f"with epoch {message.epoch}"


def report_of(job: Gang, rank: Rank, message: FromAgent) -> Report:
    """Return which report ``message`` of ``rank`` is."""
    if isinstance(message, Hello):
        return _hello_of(job, rank, message)
    if isinstance(message, Refused):
        return Report.SUSPEND_REFUSED if message.running else Report.RESUME_REFUSED
    return _KINDS[type(message)]


def _hello_of(job: Gang, rank: Rank, hello: Hello) -> Report:
    """Return whose Hello ``hello`` is: of the process of ``rank``, or of another one."""
    fresh = hello.parked and not hello.epoch
    if rank.phase is not RankPhase.ABSENT and hello.pid == rank.pid:
        had_lease = rank.phase is RankPhase.ON or (rank.phase is RankPhase.LEAVING and rank.boundary > 0)
        if fresh and had_lease and not hello.replaces and len(job.ranks) == 1:
            return Report.HELLO_ANEW
        return Report.HELLO_PARKED if hello.parked else Report.HELLO_RUNNING
    if any(other.pid == hello.pid for other in job.processes.beside):
        return Report.HELLO_BESIDE
    trains = rank.phase in _RUNS and rank.step > 0
    if hello.replaces and hello.replaces == rank.pid and not trains:
        return Report.HELLO_CHILD
    return Report.HELLO_NEXT if fresh else Report.HELLO_TRAINED


def answer_to(job: Gang, rank: Rank, report: Report, message: FromAgent | None) -> Answer:
    """Return what ``report`` of ``rank`` is, by the table."""
    phase = rank.phase
    return next(answer for if_, answer in RULES[report, phase] if holds(if_, job, rank, message))


def holds(condition: If, job: Gang, rank: Rank, message: FromAgent | None) -> bool:
    """Return True if ``condition`` holds for ``message`` of ``rank``, or for the end of its process."""
    epoch = job.epoch if message is None else message.epoch
    match condition:
        case If.ALWAYS:
            return True
        case If.EARLIER:
            return epoch < job.epoch
        case If.LATER:
            return epoch > job.epoch
        case If.OTHER_LEASE:
            return epoch != job.epoch
        case If.SAID_BEFORE:
            return isinstance(message, Suspended) and message.boundary <= rank.boundary
        case If.TOLD_TO_COME:
            early = job.state is JobState.SUSPENDING and rank.boundary < job.asked.stop_at
            return early or job.state in (JobState.STARTING, JobState.RESUMING)
        case If.MAY_PARK:
            return job.state is JobState.SUSPENDING or called_off(job)
        case If.IDLES:
            return places.idles(job)
        case If.LONE:
            return len(job.ranks) == 1
        case If.ENDED:
            return job.state.ended


def called_off(job: Gang) -> bool:
    """Return True if ranks may still park for a suspend that was called off."""
    return job.asked.stop_at == NEVER and job.state in (JobState.RUNNING, JobState.RESUMING)


def is_past(job: Gang, attempt: int | None, what: str) -> bool:
    """Return True if ``what`` was said of an earlier attempt of ``job`` than the present one.

    None stands for the present attempt: journals and processes of older versions name none.

    Raises
    ------
    IllegalTransitionError
        If there was no such attempt yet; nothing was changed.
    """
    if attempt is not None and attempt > job.attempt:
        raise job.illegal(f"{what} of attempt {attempt}, after attempt {job.attempt}")
    return attempt is not None and attempt < job.attempt
