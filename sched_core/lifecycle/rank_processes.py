"""The processes that are the ranks of a job, one after another: one command may train several times.

A process takes its rank's place with its Hello and keeps it until the process is gone. When no process of a
job is left, and its command goes on, all places are free for the next processes. A process that comes sooner
stands in line: it waits until the place is free, so no process trains without a lease.

A child of a job's process may train while its parent or another child is the rank. Such processes may wait
for each other: a pool's processes end together. So the child trains beside the rank, under the same lease,
and the job is not suspended until the child has ended.

A job without processes has nothing on its devices. The job gives them back when other jobs are to have them,
or when no process has come for as long as the job may take to reach a boundary. The policy sees the job again
when its next processes are there.
"""

from __future__ import annotations

from gpuslice.sched_core.jobs import places
from gpuslice.sched_core.jobs.failures import Kind
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import Rank, RankPhase
from gpuslice.sched_core.jobs.states import JobState, Trigger
from gpuslice.wire import Beside, Hello, Queued, Replaced, Withdraw

from . import restarts
from .events import Notice, RankGone, Tell
from .job_steps import close_if_gone, end, settle, stay
from .rank_orders import dismiss_waiting, resume_parked
from .reports import is_news_of_end
from .state import News, State


class RankProcesses:
    """The part of ``Core`` that assigns processes to ranks.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def enter(self, job: Gang, rank: Rank, hello: Hello, now: float) -> None:
        """Give ``rank``'s free place to the process that said ``hello``; announce a job that is now whole."""
        rank.enter(hello.pid, hello.boundary)
        job.processes.greeted(now)
        if job.ready:
            job.processes.complete()
            job.begin_setup(now)
            if job.lease:
                self._follow(job, now)
        self._state.touch(job)
        if not job.ready or job.wanted:
            self._state.reconcile_later(job)  # other ranks may never come; devices may be planned already

    def queue(self, job: Gang, rank: Rank, hello: Hello) -> None:
        """Put the process that said ``hello`` in line for the place of ``rank``, which another one has."""
        job.processes.queue((*_without(job.processes.line, rank.number, hello.pid), hello))
        self._state.order(Tell(job.id, rank.number, Queued(behind=rank.pid), pid=hello.pid))

    def let_beside(self, job: Gang) -> None:
        """Let children in line train beside the only rank of ``job``, if that rank is on its device."""
        (first, *others) = job.ranks
        if others or job.state is not JobState.RUNNING or first.phase is not RankPhase.ON:
            return
        children = tuple(hello for hello in job.processes.line if hello.replaces)
        job.processes.queue(tuple(hello for hello in job.processes.line if not hello.replaces))
        for hello in children:
            self.stay_beside(job, first, hello)

    def stay_beside(self, job: Gang, rank: Rank, hello: Hello) -> None:
        """Let a child process train beside ``rank``, under the present lease of ``job``."""
        job.processes.stay_beside((*_without(job.processes.beside, hello.rank, hello.pid), hello))
        self._state.order(Tell(job.id, rank.number, Beside(behind=rank.pid), pid=hello.pid))
        self._state.order(Notice("beside", job.id, {"process": hello.pid, "rank": rank.pid}))

    def keep(self, job: Gang, now: float) -> None:
        """Let ``job`` stay on its devices for now, since processes train beside its rank; tell the policy."""
        job.refusals.suspend.failed(now)
        stay(self._state, job)

    def replace(self, job: Gang, rank: Rank, hello: Hello, now: float) -> None:
        """Replace the only rank's process, which has not trained, by the process that said ``hello``."""
        self._state.order(Tell(job.id, rank.number, Replaced(), pid=rank.pid))
        self._free_places(job, now, (hello,))

    def begin_anew(self, job: Gang, hello: Hello, now: float) -> None:
        """Give the only rank's place anew to its own process, which now executes another program."""
        self._free_places(job, now, (hello,))

    def withdraw(self, job: Gang, now: float) -> None:
        """Make the only rank of ``job``, which has not begun to train in time, give up its place.

        If another process waits for the place, that process has it now. Otherwise the rank is asked to give
        its place up, and does so unless it has something on its device.
        """
        (rank,) = job.ranks
        if job.processes.line:
            first, *others = job.processes.line
            job.processes.queue(tuple(others))
            self.replace(job, rank, first, now)
        else:
            self._state.tell(job, rank.number, Withdraw(epoch=job.epoch))

    def withdrawn(self, job: Gang, now: float) -> None:
        """Free the only rank's place, which its process gave up, and the devices if no process follows."""
        self._free_places(job, now)
        if job.lease and job.processes.idle_since_s is not None:
            self.give_up_devices(job, now)

    def gone(self, job: Gang, event: RankGone, now: float) -> None:
        """Note that the process of a rank has ended, and end, restart or settle ``job`` if that is due.

        Raises
        ------
        IllegalTransitionError
            If the rank had no process.
        """
        if not is_news_of_end(job, event.rank, event.pid, event.attempt):
            return
        rank = job.ranks[event.rank]
        if event.pid and event.pid != rank.pid:
            self._leave_line(job, event)  # or it was the rank before
            return
        left_by_itself = rank.phase is RankPhase.LEAVING
        rank.end()
        if job.state.ended or job.relocating:
            close_if_gone(self._state, job, now)
        elif job.state is JobState.RELAUNCHING:
            restarts.relaunch_if_gone(self._state, job, now)
        elif len(job.ranks) > 1 and not left_by_itself and not event.unseen:
            end(self._state, job, Trigger.FAIL, f"rank {event.rank} died", now, Kind.INFRASTRUCTURE)
        else:
            dismiss_waiting(self._state, job)
            settle(self._state, job, now)
            if not job.state.ended and not job.there():
                self._free_places(job, now)

    def _leave_line(self, job: Gang, event: RankGone) -> None:
        beside = job.processes.beside
        job.processes.queue(_without(job.processes.line, event.rank, event.pid))
        job.processes.stay_beside(_without(beside, event.rank, event.pid))
        if beside and not job.processes.beside:
            job.refusals.suspend.succeeded()
            self._state.reconcile_later(job)

    def give_up_devices(self, job: Gang, now: float) -> None:
        """Take the devices from ``job``, which has no process, and withhold it until processes come."""
        self._leave(job, now)

    def _free_places(self, job: Gang, now: float, first: tuple[Hello, ...] = ()) -> None:
        """Free all places of ``job``, then give them to the next processes.

        The processes of ``first`` come first, then those that trained beside the rank, then those in line.
        """
        places.free(job, now)
        job.history.append((now, "no process left"))
        self._state.reconcile_later(job)
        if job.lease and (job.state is JobState.SUSPENDING or job.spec.joined):
            self._leave(job, now)
        if job.state.ended:
            return
        line = (*first, *job.processes.beside, *job.processes.line)
        job.processes.queue(())
        job.processes.stay_beside(())
        for hello in line:
            rank = job.ranks[hello.rank]
            if rank.phase is RankPhase.ABSENT:
                self.enter(job, rank, hello, now)
            else:
                self.queue(job, rank, hello)
        self._state.touch(job)

    def _leave(self, job: Gang, now: float) -> None:
        """Take the devices from ``job``, which has nothing on them; end the job if all its steps are made."""
        job.stand_still()
        self._state.leave(job, Trigger.EMPTY, now)
        self._state.tell_allocation(News.PARKED, job)
        job.forget_width()  # the next processes have no state, and may be on any devices
        self._state.order(Notice("idle", job.id, {"steps": job.steps}))
        if job.reached_max_steps:
            end(self._state, job, Trigger.SUCCEED, f"it has made its {job.spec.max_steps} steps", now)

    def _follow(self, job: Gang, now: float) -> None:
        """Start the new processes of ``job`` on the devices that it still has from its earlier processes.

        Their set-up does not count as attained service, like that of the first processes.
        """
        job.stand_still()
        job.move(Trigger.FOLLOW, now)
        job.begin_epoch()
        job.refusals.resume.succeeded()
        resume_parked(self._state, job)


def _without(line: tuple[Hello, ...], rank: int, pid: int) -> tuple[Hello, ...]:
    """Return ``line`` without process ``pid``, if that process waits to be rank ``rank``."""
    return tuple(hello for hello in line if (hello.rank, hello.pid) != (rank, pid))
