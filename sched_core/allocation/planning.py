"""The exchange with the policy: it is shown a view, and its plan is verified and entered in the ledger.

A plan is entered whole or not at all. A policy that asks for something impossible, or fails, is reported. The
jobs then keep what they have, and the policy starts again from the whole picture when it is asked next.
"""

from __future__ import annotations

from math import inf

from gpuslice.errors import where_raised
from gpuslice.sched_core.back_off import BackOff
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.states import Trigger
from gpuslice.sched_core.ledger import summary
from gpuslice.sched_core.lifecycle import job_steps
from gpuslice.sched_core.lifecycle.events import Notice
from gpuslice.sched_core.lifecycle.state import State
from gpuslice.sched_core.policy import (
    Changes,
    Guarantees,
    Migrate,
    Plan,
    Policy,
    PolicyError,
    Queues,
    Start,
    Stop,
    Suspend,
    View,
)
from gpuslice.sched_core.priorities import Priorities
from gpuslice.sched_core.verification import verify

from .computations import Computations
from .eligibility import Eligibility
from .planned_devices import PlannedDevices

#: The first and the longest pause before a policy that failed is asked again, in seconds.
_ASK_AGAIN_S = 1.0
_ASK_AGAIN_AT_MOST_S = 60.0
#: How often a policy is asked again at one moment because jobs of higher priority have taken devices.
_MOST_ROUNDS = 8


class Planning:
    """The part of the core that asks the policy for plans.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    policy
        The policy that is asked.
    view
        What the policy is shown.
    eligibility
        The jobs that the policy may choose.
    planned
        The devices that jobs are to have by the plan.

    Attributes
    ----------
    policy
        The policy's name.
    priorities
        The policy, as it plans for jobs of several priorities.
    computations
        The computations that the policy asks for.
    granted
        The jobs that the last plan gave devices, and whether each had others before.
    needs_durations, guarantees
        True if the policy wants to know how long jobs run; true if it can guarantee deadlines (false once it
        failed to answer whether a job has a guarantee).
    plans
        How often the policy was asked.
    wake_s
        When the policy wants to be asked even if nothing happens. None: never.
    """

    def __init__(
        self,
        state: State,
        policy: Policy,
        view: View,
        eligibility: Eligibility,
        planned: PlannedDevices,
    ) -> None:
        self.plans = 0
        self._state, self._view = state, view
        self._eligibility, self._planned = eligibility, planned
        self.computations = Computations(state.order)
        view.compute = self.computations.compute
        self.granted: list[tuple[Gang, bool]] = []
        self._ask_only(policy)

    def _ask_only(self, policy: Policy) -> None:
        """Ask ``policy`` from now on. Nothing that another one has said counts any more."""
        self._policy = policy
        self.policy = policy.name
        self.needs_durations = policy.needs_durations
        self._guarantor = policy if isinstance(policy, Guarantees) else None
        self.guarantees = self._guarantor is not None
        #: Tested only once: the test for these methods takes longer than all else that is done for a job.
        self._queues = policy if isinstance(policy, Queues) else None
        self.wake_s: float | None = None
        #: A policy that needs durations is asked again after so many seconds, since estimates change.
        self.asks_again_s = _ASK_AGAIN_S
        self.priorities = Priorities(policy)
        self._rounds = (-inf, 0)
        #: The last reported failure of the policy; the same one is not reported twice in a row.
        self._complaint = ""
        self._back_off = BackOff(_ASK_AGAIN_S, _ASK_AGAIN_AT_MOST_S)

    def use_policy(self, policy: Policy, now: float) -> None:
        """Ask ``policy``, which is new, from now on. It plans anew for all jobs as they are.

        Of jobs that share a device by the old policy's plan, the first keeps it: the new one may share none.
        Guarantees end with the policy that gave them, if the new one gives none.
        """
        self._ask_only(policy)
        self._state.ledger.policy = policy.name
        holders = self._state.ledger.holders
        for job in self._eligibility.eligible.values():
            if job.running and any(holders(device)[0] is not job for device in job.placement):
                self._planned.unassign(job, now)
        if not self.guarantees:
            for job in self._state.jobs.values():
                asks = job.spec.guaranteed or job.guaranteed
                if asks and job.guaranteed is not False and not job.state.ended:
                    self._guarantee(job, now, granted=False)
        self._planned.plan_anew()

    def level(self, job: Gang) -> int | None:
        """Return the policy's queue of ``job``, 0 the most urgent. None if the policy has none for it."""
        if self._queues is None:
            return None
        try:
            asked = self.priorities.policy_of(job)
            return asked.level(job.id) if isinstance(asked, Queues) else None
        except Exception:  # noqa: BLE001 (anybody's code, see _plan; without it, only a column stays empty)
            return None

    @property
    def failure(self) -> tuple[str, float] | None:
        """The policy's last failure and when the policy is asked again. None if its last plan was good."""
        return (self._complaint, self._back_off.until_s) if self._back_off.failures else None

    def pauses(self, now: float) -> bool:
        """Return True if the policy has failed twice in a row, and is not asked again yet.

        One failure may be of one plan: the next event makes another. Two in a row are of the policy.
        """
        return self._back_off.failures > 1 and self._back_off.pauses(now)

    def ask(self, now: float) -> None:
        """Ask the policy for a plan and enter it. If the policy fails, nothing changes."""
        self._view.now_s, self._view.restricted = now, self._state.closed.restricted
        self._view.least_slice_s = self._state.switch_costs.least_slice_s()
        plan = self._plan(now)
        self._eligibility.take_back(now)
        if plan is not None:
            self._adopt(plan, now)
            self._note_guarantees(now)
            self._ask_again(now)
        else:
            self.granted = []

    def _ask_again(self, now: float) -> None:
        """Have the policy asked again at once if jobs were suspended for others of higher priority."""
        since_s, rounds = self._rounds
        self._rounds = (now, rounds + 1 if since_s == now and self.priorities.unfinished else 0)
        if self.priorities.unfinished and rounds < _MOST_ROUNDS:
            self._state.plan_due = True
        elif self.priorities.unfinished:
            self.wake_s = min(now + self.asks_again_s, inf if self.wake_s is None else self.wake_s)

    def _plan(self, now: float) -> Plan | None:
        """Return the policy's plan, verified. None if the policy failed or its plan is impossible."""
        plan: Plan | None = None
        self.plans += 1
        try:
            plan = self.priorities.plan(self._view)
            verify(plan, self._view, self._state.ledger, self._eligibility.eligible)
        except PolicyError as error:
            self.complain(error, plan)
            self._planned.start_again()
            self._back_off.failed(now)
            self.wake_s = self._back_off.until_s
            return None
        finally:
            self.computations.forget()
        self._complaint = ""
        self._back_off.succeeded()
        self._view.changes = Changes()
        return plan

    def complain(self, error: Exception, plan: Plan | None) -> None:
        """Report that the policy failed with ``error``, unless the same was reported last."""
        text = str(error) if isinstance(error, PolicyError) else where_raised(error)
        if text != self._complaint:
            self._complaint = text
            shown = "none" if plan is None else summary(plan)
            details = {"policy": self._policy.name, "error": text, "plan": shown}
            self._state.order(Notice("policy_failed", details=details))

    def _adopt(self, plan: Plan, now: float) -> None:
        """Enter ``plan``, which is possible, in the ledger: release first, then grant."""
        self.wake_s = None if plan.wake_at_s == inf else plan.wake_at_s
        grants: list[tuple[Start | Migrate, Gang]] = []
        for decision in plan.decisions:
            job = self._eligibility.eligible[decision.job]
            if isinstance(decision, Stop):
                self._stop(job, decision.reason, now)
                continue
            if isinstance(decision, Suspend | Migrate):
                self._planned.unassign(job, now)
            if isinstance(decision, Start | Migrate):
                grants.append((decision, job))
        for grant, job in grants:
            self._planned.assign(job, grant.devices, now, shared=grant.shared)
        self.granted = [(job, isinstance(grant, Migrate)) for grant, job in grants]
        if self._policy.needs_durations and not all(
            job.running for job in self._eligibility.eligible.values()
        ):
            # Estimates change although nothing happens.
            self.wake_s = min(now + self.asks_again_s, inf if self.wake_s is None else self.wake_s)

    def _stop(self, job: Gang, reason: str, now: float) -> None:
        if job.spec.last_deadline_s is not None and job.guaranteed is None:
            job.guaranteed = False
        self._state.order(Notice("stopped", job.id, {"policy": self._policy.name, "reason": reason}))
        job_steps.end(self._state, job, Trigger.CANCEL, reason, now)
        self._eligibility.look_at(job, now)  # its devices are free for the rest of the plan

    def _note_guarantees(self, now: float) -> None:
        """Take over the policy's decisions on guaranteed deadlines, and send a notice of each change."""
        guarantor = self._guarantor
        if guarantor is None:
            return
        for job in self._eligibility.dated.values():
            try:
                asked = self.priorities.policy_of(job)
                granted = (asked if isinstance(asked, Guarantees) else guarantor).guaranteed(job.id)
            except Exception as error:  # noqa: BLE001 (anybody's code, see _plan)
                self.complain(error, None)
                self.guarantees, self._guarantor = False, None
                return
            if granted is not None and granted is not job.guaranteed:
                self._guarantee(job, now, granted=granted)

    def _guarantee(self, job: Gang, now: float, *, granted: bool) -> None:
        """Note that the deadline of ``job`` is guaranteed from now on, or is not, and send a notice of it."""
        what = "guaranteed" if granted else "not_guaranteed" if job.guaranteed is None else "guarantee_lost"
        job.guaranteed = granted
        job.history.append((now, what.replace("_", " ")))
        self._state.order(Notice(what, job.id, {"deadline_s": job.spec.last_deadline_s}))
