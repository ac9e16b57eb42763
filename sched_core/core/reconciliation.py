"""After every event, take the steps that are possible now towards what the policy wants."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from gpuslice.errors import InvariantError
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import IN_TRANSIT, Trigger
from gpuslice.sched_core.lifecycle.steps import MOST_STEPS, Step, Waits, next_step

from . import restarts, timeouts
from .contract import CoreContract
from .events import WakeAt

#: A policy is asked at most so often at one moment, and then again so many seconds later. Without that,
#: a policy that changes its answer each time would be asked for ever.
MOST_PLANS = 8
ASK_AGAIN_S = 0.1


class Reconciliation:
    """The jobs that are not yet where the policy wants them, and when to look at them again.

    Parameters
    ----------
    core
        The core that this object is a part of.
    """

    def __init__(self, core: CoreContract) -> None:
        self._core = core
        #: Jobs whose lease is not what the policy wants, or that wait for another try.
        self._jobs: dict[str, Gang] = {}
        self._wake_s: float | None = None

    @property
    def jobs(self) -> Mapping[str, Gang]:
        """The jobs that are not yet where the policy wants them, by id; for reading."""
        return MappingProxyType(self._jobs)

    def add(self, job: Gang) -> None:
        """Reconcile ``job`` after this event and the next ones, until nothing is left to do."""
        self._jobs[job.id] = job

    def forget(self, job: Gang) -> None:
        """Do not reconcile ``job`` any more."""
        self._jobs.pop(job.id, None)

    def woken(self) -> None:
        """Note that the last wake time has come, so that the next one is ordered anew."""
        self._wake_s = None

    def update(self, now: float) -> None:
        """Ask the policy if it is due, take the steps that are possible now, and order the next wake time."""
        core = self._core
        for _ in range(MOST_PLANS):
            core.planning.ask(now)
            core.trials.update(now)
            for job in list(self._jobs.values()):
                self._reconcile(job, now)
            core.prestart.update(now)
            if not core.planning.due:
                break  # no step made a new plan necessary
        core.deadlines.report_missed(now)
        jobs, planned_s = self._jobs.values(), core.planning.wake_s
        waits = [when_s for job in jobs for when_s in _tried_again_s(job) if when_s > now]
        waits += [*map(timeouts.due_s, jobs), inf if planned_s is None else planned_s]
        waits += [core.deadlines.due_s(), core.trials.due_s(), core.prestart.due_s()]
        if core.planning.due:
            waits.append(now + ASK_AGAIN_S)
        wake_s = min((when_s for when_s in waits if when_s < inf), default=None)
        if wake_s != self._wake_s:
            self._wake_s = wake_s
            core.order(WakeAt(wake_s))

    def _reconcile(self, job: Gang, now: float) -> None:
        core = self._core
        if now >= timeouts.due_s(job):
            timeouts.handle_late(core, job, now)
        if now >= job.not_before_s:
            core.prestart.offer(job, now)
        for _ in range(MOST_STEPS + 1):
            step = next_step(job, self, now)
            if isinstance(step, Waits):
                break
            self._take(job, step, now)
            if step is Step.KEEP:
                return  # stopping is tried again after a pause
        else:
            raise InvariantError(f"job {job.id} goes on after {MOST_STEPS} steps")
        if now >= job.not_before_s and _is_there(job):
            self.forget(job)

    def _take(self, job: Gang, step: Step, now: float) -> None:
        """Carry out ``step`` for ``job``."""
        core = self._core
        match step:
            case Step.GIVE_UP:
                core.processes.give_up_devices(job, now)
            case Step.STOP:
                job.move(Trigger.REVOKE, now)
                core.switch_costs.begun(job)
                job.asked.begin()
                # The first boundary is before the first mini-batch, which a job's first slice is for.
                core.reports.aim(job, max(1, *(rank.boundary for rank in job.ranks)) + 1)
            case Step.KEEP:
                core.processes.keep(job, now)
            case Step.RELAUNCH:
                restarts.end_to_relaunch(core, job, now)
            case Step.RELOCATE:
                core.relocations.begin(job, now)
            case Step.ENTER:
                core.grant(job, job.wanted, now)
            case Step.STOP_LATER:
                core.reports.aim(job, job.asked.stop_at)
            case Step.COME_AGAIN:
                for rank in job.present(RankPhase.PARKED):
                    core.resume_rank(job, rank.number)

    # What ``next_step`` asks.

    def blocker(self, job: Gang) -> tuple[int, Gang] | None:
        """Return a device of ``job.wanted`` and a job that must leave it first. None if there is none.

        Jobs that share a device by the policy's plan do not block each other. A trial shares nothing.
        """
        core = self._core
        for device in job.wanted:
            sharers = () if job.borrowed else core.ledger.holders(device)
            for other in core.occupants[device].values():
                if other not in sharers:
                    return device, other
        return None

    def misplaced(self, job: Gang) -> bool:
        """Return True if ``job`` is to have devices of nodes where it has no processes."""
        return self._core.relocations.misplaced(job)

    def can_leave(self, job: Gang) -> bool:
        """Return True if new processes on another node could continue ``job`` from its state now."""
        return self._core.relocations.can_leave(job)


def _is_there(job: Gang) -> bool:
    """Return True if ``job`` is where it is to be, and has nothing to do there within a time limit."""
    there = job.lease == job.wanted and job.state not in IN_TRANSIT
    return there and not job.state.ended and timeouts.due_s(job) == inf


def _tried_again_s(job: Gang) -> tuple[float, ...]:
    """Return the times at which the next attempt, move, suspend and resume of ``job`` may be tried."""
    tries = job.not_before_s, job.refusals.suspend.until_s, job.refusals.resume.until_s
    moves = job.ready and job.wanted and not job.lease and not job.relocation.ending
    return (*tries, job.relocation.again_s) if moves else tries
