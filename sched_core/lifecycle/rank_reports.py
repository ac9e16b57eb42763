"""What the core does with the reports of ranks: fencing by epoch, and the gang stop.

All ranks of a gang stop at one boundary, ``stop_at``. It starts just ahead of the newest boundary that any
rank has reported. A rank that is past ``stop_at`` already says so, and ``stop_at`` is raised, by more each
time. Ranks that have parked too early are sent on. No rank waits for another inside the training loop.
"""

from __future__ import annotations

from gpuslice.sched_core.jobs.failures import Kind
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import Rank, RankPhase
from gpuslice.sched_core.jobs.states import JobState, Trigger
from gpuslice.wire import (
    Bye,
    Dismiss,
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

from .events import Notice
from .job_steps import begin, call_off, end, finish, settle, stay
from .rank_orders import aim, dismiss_waiting, resume_rank, tell_to_stop
from .rank_processes import RankProcesses
from .reports import called_off, is_news, report_of
from .state import News, State
from .tables import Report

#: A job fails when its resume was refused so often in a row.
MAX_RESUME_REFUSALS = 5
#: A job stays on its devices, until the policy plans anew, when its suspend was refused so often in a row.
MAX_SUSPEND_REFUSALS = 5
#: The most doublings of the distance to ``stop_at``. More make no difference.
_MOST_DOUBLINGS = 30


class RankReports:
    """The part of ``Core`` that acts on the messages of ranks.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    processes
        The part that assigns processes to ranks.
    needs_durations
        True if the policy wants to know how long jobs run.
    """

    def __init__(self, state: State, processes: RankProcesses, *, needs_durations: bool = False) -> None:
        self._state, self._processes, self.needs_durations = state, processes, needs_durations

    def take(self, job: Gang, number: int, message: FromAgent, now: float) -> None:
        """Act on ``message`` of rank ``number``, if it is news.

        Raises
        ------
        IllegalTransitionError
            If that rank cannot have said this now; nothing was changed.
        """
        if not is_news(job, number, message):
            return
        rank = job.ranks[number]
        match message:
            case Hello():
                self._hello(job, rank, message, now)
            case Progress():
                rank.report(message)
                self._advance(job, rank, now, message.boundary, message.step)
                job.peak_bytes = max(job.peak_bytes, message.peak_bytes)
                self._note_where_it_began(job, rank, message.went_on_from)
                self._time(job, now)
                if job.processes.line:
                    self._processes.let_beside(job)
                if job.reached_max_steps:
                    finish(self._state, job, now)
            case Profiled():
                if job.spec.skew is None and message.nbytes:
                    job.skew = min(1.0, message.largest_bytes / message.nbytes)
            case Resumed():
                self._resumed(job, rank, message, now)
            case Suspended():
                self._suspended(job, rank, message, now)
            case Overshot():
                self._overshot(job, rank, message, now)
            case Refused():
                self._refused(job, rank, message, now)
            case Withdrawn():
                self._processes.withdrawn(job, now)
            case Bye():
                self._advance(job, rank, now, message.boundary, message.step)
                rank.leave()
                dismiss_waiting(self._state, job)
                settle(self._state, job, now)

    def _note_where_it_began(self, job: Gang, rank: Rank, boundary: int) -> None:
        """Send a notice of the snapshot a job continues from, once all ranks that keep state named it."""
        if boundary == rank.went_on_from:
            return
        rank.went_on(boundary)
        if boundary and {one.went_on_from for one in job.members[: job.keepers]} == {boundary}:
            details = {"attempt": job.attempt + 1, "boundary": boundary}
            self._state.order(Notice("went_on", job.id, details))

    def _time(self, job: Gang, now: float) -> None:
        """Measure how long a step of ``job`` takes, if its number of steps is known and its progress counts.

        A policy that plans with step times is asked once the time is known. The first step and that moment
        each send a notice, so that the journal keeps these two of all heartbeats.
        """
        if not job.spec.steps or not job.counts(now):
            return
        known = job.step_time.step_s is not None
        if job.step_time.note(job.steps, job.progress_at(now)):
            details = {"step": job.steps, "after_s": now - job.spec.submit_s}
            self._state.order(Notice("first_step", job.id, details))
        step_s = job.step_time.step_s
        if self.needs_durations and step_s is not None and not known:
            self._state.order(Notice("timed", job.id, {"step_s": step_s}))
            self._state.plan_due = True

    def _hello(self, job: Gang, rank: Rank, message: Hello, now: float) -> None:
        processes = self._processes
        match report_of(job, rank, message):
            case Report.HELLO_ANEW:
                processes.begin_anew(job, message, now)
            case Report.HELLO_PARKED | Report.HELLO_RUNNING if rank.phase is RankPhase.LEAVING:
                if rank not in job.members:
                    self._state.tell(job, rank.number, Dismiss(epoch=job.epoch))
            case Report.HELLO_PARKED | Report.HELLO_RUNNING:
                self._hello_again(job, rank, message, now)
            case Report.HELLO_BESIDE:
                processes.stay_beside(job, rank, message)
            case Report.HELLO_CHILD:
                processes.replace(job, rank, message, now)
            case _ if rank.phase is RankPhase.ABSENT:
                processes.enter(job, rank, message, now)
            case _:
                processes.queue(job, rank, message)

    def _hello_again(self, job: Gang, rank: Rank, message: Hello, now: float) -> None:
        """Restore what was lost with the connection of ``rank``: the last orders, or the rank's last report.

        A parked rank sends its last ``Suspended`` again after the Hello.
        """
        present = message.epoch == job.epoch
        stopping = job.state is JobState.SUSPENDING or called_off(job)
        if rank.phase is RankPhase.COMING:
            if not message.parked or (present and stopping and message.boundary > rank.boundary):
                rank.arrive()  # its Resumed was lost
            else:
                resume_rank(self._state, job, rank.number)
        elif rank.phase is RankPhase.PARKED and not message.parked:
            rank.arrive()
        self._advance(job, rank, now, message.boundary)
        if stopping and rank.phase is not RankPhase.PARKED:
            tell_to_stop(self._state, job, rank)
        settle(self._state, job, now)

    def _stay(self, job: Gang, now: float) -> None:
        """Let ``job`` stay on its devices, since one of its ranks cannot leave; try again after a pause."""
        call_off(self._state, job, now)
        job.refusals.suspend.failed(now)
        self._state.tell_allocation(News.SETTLED, job)
        if job.refusals.suspend.failures >= MAX_SUSPEND_REFUSALS:
            stay(self._state, job)

    def _advance(self, job: Gang, rank: Rank, now: float, boundary: int, step: int = 0) -> None:
        rank.advance(boundary, step)
        if not job.processes.trains and (boundary or step):
            begin(self._state, job, now)

    def _resumed(self, job: Gang, rank: Rank, message: Resumed, now: float) -> None:
        rank.arrive()
        self._state.switch_costs.resumed(job, rank.number, message)
        self._advance(job, rank, now, message.boundary)
        settle(self._state, job, now)

    def _suspended(self, job: Gang, rank: Rank, message: Suspended, now: float) -> None:
        comes_back = called_off(job)
        rank.park(message)
        job.home = job.lease or job.home
        job.step_time.suspended()
        self._state.switch_costs.parked(job, rank.number, message)
        self._advance(job, rank, now, message.boundary, message.step)
        if comes_back:
            if job.allows(Trigger.LATE_PARK):
                job.move(Trigger.LATE_PARK, now)
                job.stand_still()
                self._state.reconcile_later(job)
            resume_rank(self._state, job, rank.number)
        elif len(job.ranks) > 1 and message.boundary != job.asked.stop_at:
            aim(self._state, job, max(job.asked.stop_at, message.boundary))
        elif len(job.ranks) == 1:
            job.asked.aim(message.boundary)
        settle(self._state, job, now)

    def _overshot(self, job: Gang, rank: Rank, message: Overshot, now: float) -> None:
        self._advance(job, rank, now, message.boundary)
        if job.state is JobState.SUSPENDING and message.boundary >= job.asked.stop_at:
            # Odd distances, or a rank that cannot park at odd boundaries might be told of no other.
            aim(
                self._state, job, message.boundary + 2 ** (min(job.asked.overshoots, _MOST_DOUBLINGS) + 1) - 1
            )
            job.asked.overshot()

    def _refused(self, job: Gang, rank: Rank, message: Refused, now: float) -> None:
        self._advance(job, rank, now, message.boundary)
        job.history.append((now, f"rank {rank.number} refused: {message.error}"))
        if not message.running:
            rank.stay()
            job.refusals.resume_error = message.error
            if not job.refusals.resume.pauses(now):  # else another rank has refused the same try
                job.refusals.resume.failed(now)
            if not message.retryable or job.refusals.resume.failures >= MAX_RESUME_REFUSALS:
                reason = f"it could not be resumed: {message.error}"
                end(self._state, job, Trigger.FAIL, reason, now, Kind.RESOURCE)
                return
        elif job.state is JobState.SUSPENDING:
            job.refusals.suspend_error = message.error
            self._stay(job, now)
        self._state.reconcile_later(job)
