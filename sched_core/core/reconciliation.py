"""From what is wanted to what is: after every event, do what can be done towards what the policy wants."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import IN_TRANSIT, JobState, Trigger

from . import restarts, timeouts
from .contract import CoreContract
from .events import WakeAt


class Reconciliation:
    """The jobs that are not yet where the policy wants them, and when to look at them again.

    Parameters
    ----------
    core
        Whose.
    """

    def __init__(self, core: CoreContract) -> None:
        self._core = core
        #: Jobs whose lease is not what the policy wants, or that wait for another try.
        self._jobs: dict[str, Gang] = {}
        self._wake_s: float | None = None

    @property
    def jobs(self) -> Mapping[str, Gang]:
        """By id; for reading."""
        return MappingProxyType(self._jobs)

    def add(self, job: Gang) -> None:
        """Look at ``job`` again after this event and those that follow, until nothing is left to do."""
        self._jobs[job.id] = job

    def forget(self, job: Gang) -> None:
        """Look at ``job`` no more."""
        self._jobs.pop(job.id, None)

    def woken(self) -> None:
        """The time for which the shell was asked last has come."""
        self._wake_s = None

    def update(self, now: float) -> None:
        """Ask the policy if there is reason to, then do what can be done towards what it wants."""
        core = self._core
        core.planning.ask(now)
        core.trials.update(now)
        for job in list(self._jobs.values()):
            self._reconcile(job, now)
        core.prestart.update(now)
        if core.planning.due:  # somebody was late
            self.update(now)
            return
        core.deadlines.report_missed(now)
        jobs, planned_s = self._jobs.values(), core.planning.wake_s
        waits = [when_s for job in jobs for when_s in _tried_again_s(job) if when_s > now]
        waits += [*map(timeouts.due_s, jobs), inf if planned_s is None else planned_s]
        waits += [core.deadlines.due_s(), core.trials.due_s(), core.prestart.due_s()]
        wake_s = min((when_s for when_s in waits if when_s < inf), default=None)
        if wake_s != self._wake_s:
            self._wake_s = wake_s
            core.order(WakeAt(wake_s))

    def _reconcile(self, job: Gang, now: float) -> None:
        core = self._core
        if now >= timeouts.due_s(job):
            timeouts.handle_late(core, job, now)
        if job.state.ended:
            return
        if job.idle_since_s is not None and job.lease and job.lease != job.wanted:
            core.processes.give_up_devices(job, now)
        if now < job.not_before_s:
            return
        core.prestart.offer(job, now)
        if job.state is JobState.RUNNING and job.lease != job.wanted:
            if job.refusals.suspend.pauses(now):
                return
            if job.beside:
                core.processes.keep(job, now)
                return
            job.move(Trigger.REVOKE, now)
            core.switch_costs.begun(job)
            job.overshoots = 0
            # The first boundary is before the first mini-batch, which a job's first slice is for.
            core.reports.aim(job, max(1, *(rank.boundary for rank in job.ranks)) + 1)
        elif job.needs_relaunch and job.launched and job.allows(Trigger.RELAUNCH):
            if job.state is not JobState.SUSPENDING:
                restarts.end_to_relaunch(core, job, now)
        elif job.state in (JobState.QUEUED, JobState.SUSPENDED) and job.wanted and self._can_enter(job):
            if core.relocations.misplaced(job):
                core.relocations.begin(job, now)
            else:
                core.grant(job, job.wanted, now)
        elif job.state in IN_TRANSIT and not job.refusals.resume.pauses(now):
            core.reports.try_again(job)
        if job.lease == job.wanted and job.state not in IN_TRANSIT and timeouts.due_s(job) == inf:
            self.forget(job)

    def _can_enter(self, job: Gang) -> bool:
        """Whether ``job`` has ranks and its devices nobody but who shares them; a trial shares nothing."""
        core = self._core
        if job.relocating or not job.training() or not job.ready:
            return False  # they are still coming, or ending, or gone, and how they ended will be told
        if job.borrowed:
            return not any(core.occupants[device] for device in job.borrowed)
        return all(
            other in core.ledger.holders(device)
            for device in job.wanted
            for other in core.occupants[device].values()
        )


def _tried_again_s(job: Gang) -> tuple[float, ...]:
    """When what ``job`` has refused or failed to do is tried again."""
    return job.not_before_s, job.refusals.suspend.until_s, job.refusals.resume.until_s
