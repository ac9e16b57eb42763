"""Take the steps that are possible now towards where jobs are to be, and say when to look again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from gpuslice.errors import InvariantError
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import IN_TRANSIT, Trigger

from . import ahead, job_steps, launches, restarts, timeouts
from .rank_orders import aim, resume_parked
from .rank_processes import RankProcesses
from .state import State
from .steps import MOST_STEPS, Step, Waits, next_step

#: Returns the progress per second of a job on so many devices, in seconds of a dedicated run.
RateOf = Callable[[Gang, int], float]
#: Has the command of a job started when the job's turn comes.
Offer = Callable[[Gang, float], None]


class Reconciliation:
    """The steps of jobs that are not yet where they are to be.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    processes
        The part that assigns processes to ranks.
    offer, rate_of
        What starts the command of a job, and how fast a job is on some devices.
    """

    def __init__(self, state: State, processes: RankProcesses, offer: Offer, rate_of: RateOf) -> None:
        self._state, self._processes = state, processes
        self._offer, self._rate_of = offer, rate_of

    def expire(self, now: float) -> None:
        """Handle the jobs that are late by ``now`` with what they were told."""
        for job in list(self._state.unreconciled.values()):
            if now >= timeouts.due_s(job):
                timeouts.handle_late(self._state, self._processes, job, now)

    def take_steps(self, now: float) -> None:
        """Take all steps that are possible now."""
        for job in list(self._state.unreconciled.values()):
            if not job.state.ended:
                self._reconcile(job, now)

    def due_s(self, now: float) -> float:
        """Return when to look at a job again even if nothing happens; infinite if there is no such job."""
        jobs = self._state.unreconciled.values()
        tries = (when_s for job in jobs for when_s in _tried_again_s(job) if when_s > now)
        return min(min(tries, default=inf), min(map(timeouts.due_s, jobs), default=inf))

    def _reconcile(self, job: Gang, now: float) -> None:
        if now >= job.not_before_s and not self._state.is_awaiting(job):
            self._offer(job, now)
        for _ in range(MOST_STEPS + 1):
            step = next_step(job, self._state, now)
            if isinstance(step, Waits):
                break
            self._take(job, step, now)
            if step is Step.KEEP:
                return  # stopping is tried again after a pause
        else:
            raise InvariantError(f"job {job.id} goes on after {MOST_STEPS} steps")
        if now >= job.not_before_s and _is_there(job) and not self._state.is_awaiting(job):
            self._state.unreconciled.pop(job.id, None)

    def _take(self, job: Gang, step: Step, now: float) -> None:
        """Carry out ``step`` for ``job``."""
        state = self._state
        match step:
            case Step.GIVE_UP:
                self._processes.give_up_devices(job, now)
            case Step.STOP:
                job.move(Trigger.REVOKE, now)
                state.switch_costs.begun(job)
                # The first boundary is before the first mini-batch, which a job's first slice is for.
                aim(state, job, max(1, *(rank.boundary for rank in job.ranks)) + 1)
            case Step.KEEP:
                self._processes.keep(job, now)
            case Step.RELAUNCH:
                restarts.end_to_relaunch(state, job, now)
            case Step.PUT_AWAY:
                restarts.put_away(state, job, now)
            case Step.RELOCATE:
                launches.relocate(state, job, now)
            case Step.ENTER:
                rate = self._rate_of(job, len(job.wanted))
                job_steps.grant(state, job, job.wanted, rate, now)
            case Step.STOP_LATER:
                aim(state, job, job.asked.stop_at)
            case Step.START_AHEAD:
                ahead.start(state, job, now)
            case Step.GIVE_UP_AHEAD:
                ahead.give_up(state, job)
            case Step.COME_AGAIN:
                resume_parked(state, job)


def _is_there(job: Gang) -> bool:
    """Return True if ``job`` is where it is to be, and has nothing to do there within a time limit."""
    there = job.lease == job.wanted and job.state not in IN_TRANSIT
    return there and not job.state.ended and timeouts.due_s(job) == inf


def _tried_again_s(job: Gang) -> Iterable[float]:
    """Return the times at which the next attempt, move, suspend and resume of ``job`` may be tried."""
    tries = (
        *(job.not_before_s, job.refusals.suspend.until_s, job.refusals.resume.until_s),
        job.relocation.trains_until_s,
    )
    moves = job.ready and job.wanted and not job.lease and not job.relocating
    return (*tries, job.relocation.again_s) if moves else tries
