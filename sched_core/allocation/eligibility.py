"""Which jobs the policy may choose from: those that are ready, within their quota and not withdrawn.

After each event it is computed anew whether the policy may choose the jobs that the event touched. A
difference from what the policy knows is told to the policy.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.jobs.wait_reasons import Waits
from gpuslice.sched_core.lifecycle.state import News, State
from gpuslice.sched_core.policy import View

from .planned_devices import PlannedDevices
from .prestart import Prestart
from .quotas import Quotas
from .trials import Trials


class Eligibility:
    """The jobs that the policy may choose, and those that wait outside their tenant's quota.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    view
        What the policy is shown: ``changes`` are noted here, and ``eligible`` are its jobs.

    Attributes
    ----------
    eligible, dated
        The jobs that the policy may choose, by id, in the order in which they were shown; those of them that
        have deadlines.
    """

    def __init__(
        self,
        state: State,
        view: View,
        eligible: dict[str, Gang],
        quotas: Quotas,
        waits: Waits,
        planned: PlannedDevices,
        trials: Trials,
        prestart: Prestart,
    ) -> None:
        self._state, self._view, self._planned = state, view, planned
        self._quotas, self._waits, self._trials, self._prestart = quotas, waits, trials, prestart
        self.eligible = eligible
        self.dated: dict[str, Gang] = {}
        #: The ids of the jobs that are not withdrawn. They have, or queue for, a part of a quota.
        self._inside: set[str] = set()
        #: How often each job that has not ended had failed, or could not be started, at the last look.
        self._failures: dict[str, int] = {}
        #: Withdrawn jobs whose devices are still entered for them, until the policy has planned.
        self._withheld: dict[str, Gang] = {}

    def hear(self, news: News, job: Gang, now: float) -> None:
        """Tell the policy ``news`` of ``job``, if the policy may choose it."""
        changes = self._view.changes
        if news is News.PARKED and not job.running:
            job.progress_from(now)
            if job.shown:
                self._waits.begin(job, now)
                self.hear(News.SETTLED, job, now)
        elif news is News.BEGUN:
            if job.running and job.shown and not changes.reset:
                changes.begun.append(job)
            self._state.plan_due = True
        elif news is News.SETTLED:
            if not job.running and job.shown and not changes.reset:
                changes.settled.append(job)
            self._state.plan_due = True
        elif news is News.STAYS and job.lent:
            self._trials.avoid(job, now)
        elif news is News.STAYS and job.shown:
            self._planned.keep_lease(job, now)

    def look_at(self, job: Gang, now: float) -> bool:
        """Show ``job`` to the policy, or withdraw it, if that is due; let it queue for its quota or a trial.

        Return True if the job, or an attempt of it, has ended since the last look.
        """
        self._trials.look_at(job, now)
        ended = self._has_ended(job)
        if job.id in self._inside and (job.withdrawn or ended):
            self._withdraw(job, now)
        if not job.withdrawn:
            self._enter(job, now)
        if job.running and not job.shown and not job.state.ended:
            self._withheld[job.id] = job  # of an attempt that failed before
            self._state.plan_due = True
        return ended

    def _has_ended(self, job: Gang) -> bool:
        """Return True if ``job``, or an attempt of it, has ended since the last look."""
        former = self._failures.pop(job.id, None)
        failures = job.failures + job.command.misses
        if not job.state.ended:
            self._failures[job.id] = failures
        ended = former is not None and (job.state.ended or former != failures)
        if ended and job.state is JobState.SUCCEEDED:
            self._view.changes.succeeded.append(job)
        return ended

    def _enter(self, job: Gang, now: float) -> None:
        if job.id not in self._inside:
            self._inside.add(job.id)
            self._quotas.enter(job)
        if job.shown or not job.ready:
            return
        if not job.tried:
            if not self._quotas.waits_for_place(job):
                self._trials.enter(job)
        elif not self._quotas.keeps_out(job):
            self._show(job, now)
        elif job.waits_since is None or not job.waits_since.quota:
            self._planned.wait(job, now, quota=True)

    def use_quotas(self, tenants: Mapping[str, int], now: float) -> None:
        """Have other quotas from now on. Jobs beyond them leave their devices and wait for their part."""
        queueing = [job for job in self._state.jobs.values() if job.id in self._inside]
        for job in self._quotas.change(tenants, queueing):
            if job.shown and self._quotas.keeps_out(job):
                self._hide(job)
                self._withhold(job)
            self._state.reconcile_later(job)

    def _show(self, job: Gang, now: float) -> None:
        self._planned.wait(job, now)
        job.show(shown=True)
        self.eligible[job.id] = job
        if job.spec.last_deadline_s is not None:
            self.dated[job.id] = job
        if not self._view.changes.reset:
            self._view.changes.arrived.append(job)
        self._state.plan_due = True

    def _withdraw(self, job: Gang, now: float) -> None:
        """Take from the policy a job that it can no longer choose. Its quota goes to the next jobs."""
        self._inside.discard(job.id)
        self._waits.end(job, now)
        self._trials.leave(job, now)
        self._prestart.leave(job)
        if job.shown:
            self._hide(job)
        self._withhold(job)
        for follower in self._quotas.leave(job):
            self._state.reconcile_later(follower)  # it may be shown or started now

    def _hide(self, job: Gang) -> None:
        """Tell the policy that it cannot choose ``job`` any more."""
        job.show(shown=False)
        del self.eligible[job.id]
        self.dated.pop(job.id, None)
        if not self._view.changes.reset:
            self._view.changes.withdrawn(job)

    def _withhold(self, job: Gang) -> None:
        """Release what ``job`` has by the plan. The policy may give it to others."""
        if job.running:
            self._state.ledger.release(job)
        if not job.state.ended:
            self._withheld[job.id] = job
        self._state.plan_due = True

    def take_back(self, now: float) -> None:
        """Unassign the withdrawn jobs. This must follow a plan, which had to see who held the devices."""
        for job in self._withheld.values():
            job.unassign(now)
        self._withheld.clear()
