"""The exchange with the policy: the view that it is shown, and the ledger of what it wants.

A plan is entered whole or not at all. A policy that asks for something impossible, or fails, is reported. The
jobs then keep what they have, and the policy starts again from the whole picture when it is asked next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from gpuslice.errors import where_raised
from gpuslice.sched_core.back_off import BackOff
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.jobs.bound_jobs import BoundJobs
from gpuslice.sched_core.jobs.estimates import Estimates
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.losses import ReportedLosses
from gpuslice.sched_core.jobs.quotas import Quotas
from gpuslice.sched_core.jobs.states import JobState, Trigger
from gpuslice.sched_core.jobs.wait_reasons import Waits
from gpuslice.sched_core.ledger import Ledger, summary
from gpuslice.sched_core.policy import (
    Changes,
    Guarantees,
    Migrate,
    Plan,
    Policy,
    PolicyError,
    Queues,
    Shares,
    Start,
    Stop,
    Suspend,
    View,
)
from gpuslice.sched_core.policy_calls import ask_for_plan
from gpuslice.sched_core.verification import verify

from .computations import Computations
from .contract import CoreContract
from .events import Computed, Notice
from .moves import Moves
from .throughput import MeasuredThroughput

#: The first and the longest pause before a policy that failed is asked again, in seconds.
_ASK_AGAIN_S = 1.0
_ASK_AGAIN_AT_MOST_S = 60.0


class Planning:
    """The part of ``Core`` that asks the policy for plans and keeps the ledger.

    Parameters
    ----------
    core
        The core that this object is a part of.
    cluster
        The nodes and devices to plan with.
    policy
        The policy that is asked.
    quotas
        The most devices of each tenant's jobs together, by tenant.

    Attributes
    ----------
    policy, quotas
        The policy's name, and the tenants' quotas, which limit the jobs that it sees.
    waits
        How long jobs wait, and for what reason.
    ledger
        The devices that each job is to have.
    moves
        The moves of jobs against the policy's plan.
    computations
        The computations that the policy asks for.
    estimates
        The estimates of how long jobs run that policies see.
    due, plans
        True if there is reason to ask the policy; how often it was asked.
    needs_durations, guarantees
        True if the policy wants to know how long jobs run; true if it can guarantee deadlines (false once it
        failed to answer whether a job has a guarantee).
    wake_s
        When the policy wants to be asked even if nothing happens. None: never.
    """

    def __init__(
        self, core: CoreContract, cluster: Cluster, policy: Policy, quotas: Mapping[str, int]
    ) -> None:
        self.policy, self.quotas = policy.name, Quotas(quotas)
        self._sharer = policy if isinstance(policy, Shares) else None
        self.waits = Waits(lambda: self.ledger.free, self._over_share if self._sharer else None)
        self.ledger = Ledger(cluster, policy.name)
        self.due, self.plans = False, 0
        self.needs_durations = policy.needs_durations
        self._guarantor = policy if isinstance(policy, Guarantees) else None
        self.guarantees = self._guarantor is not None
        #: Tested only once: the test for these methods takes longer than all else that is done for a job.
        self._queues = policy if isinstance(policy, Queues) else None
        self.wake_s: float | None = None
        self._core = core
        self._policy = policy
        #: The jobs the policy may choose from: ready, not held, not ended.
        self._eligible: dict[str, Gang] = {}
        #: The jobs of ``_eligible`` that have deadlines.
        self._dated: dict[str, Gang] = {}
        self.estimates = Estimates()
        self.computations = Computations(core.order)
        self._view = View(cluster, self._eligible, self.estimates)
        self._view.losses = ReportedLosses()
        self._view.compute = self.computations.compute
        self._view.switch_s = lambda job, at: core.switch_costs.expected_s(core.jobs[job.id], at)
        self.throughput = self._view.throughput = MeasuredThroughput(policy, core.order)
        self._view.device_memory_bytes = core.device_memory_bytes
        #: Withdrawn jobs whose devices are still entered for them, until the policy has planned.
        self._withheld: list[Gang] = []
        self.bound_jobs = BoundJobs()
        self.moves = Moves(core, self)
        #: The last reported failure of the policy; the same one is not reported twice in a row.
        self._complaint = ""
        self._back_off = BackOff(_ASK_AGAIN_S, _ASK_AGAIN_AT_MOST_S)

    def level(self, job: Gang) -> int | None:
        """Return the policy's queue of ``job``, 0 the most urgent. None if the policy has none for it."""
        if self._queues is None:
            return None
        try:
            return self._queues.level(job.id)
        except Exception:  # noqa: BLE001 (anybody's code, see _plan; without it, only a column stays empty)
            return None

    @property
    def failure(self) -> tuple[str, float] | None:
        """The policy's last failure and when the policy is asked again. None if its last plan was good."""
        return (self._complaint, self._back_off.until_s) if self._back_off.failures else None

    def _over_share(self, tenant: str, demand: int) -> bool:
        """Return True if the policy says that ``tenant`` has used up its share."""
        try:
            return self._sharer is not None and self._sharer.over_share(tenant, demand)
        except Exception as error:  # noqa: BLE001 (anybody's code, see _plan)
            self._complain(error, None)
            self._sharer = None
            return False

    def announce(self, job: Gang, now: float) -> None:
        """Show the policy a job that is ready to run, as soon as its tenant's quota allows."""
        if self.quotas.enter(job):
            self._show(job, now)
        else:
            self._wait(job, now, quota=True)

    def _wait(self, job: Gang, now: float, *, quota: bool = False) -> None:
        """Start to measure why ``job`` waits, if it has left its devices."""
        if not job.lease:
            self.waits.begin(job, now, quota=quota)

    def parked(self, job: Gang, now: float) -> None:
        """Note that ``job`` has left its devices. It waits from now on, unless it is to have others."""
        if job.running:
            return
        job.progress_from(now)
        if job.id in self._eligible:
            self.waits.begin(job, now)
            self.settled(job)

    def settled(self, job: Gang) -> None:
        """Tell the policy that ``job`` has attained more service since a plan took its devices."""
        if not job.running and job.id in self._eligible and not self._view.changes.reset:
            self._view.changes.settled.append(job)
        self.due = True

    def _show(self, job: Gang, now: float) -> None:
        self._wait(job, now)
        self._eligible[job.id] = job
        if job.spec.last_deadline_s is not None:
            self._dated[job.id] = job
        if not self._view.changes.reset:
            self._view.changes.arrived.append(job)
        self.due = True

    def withdraw(self, job: Gang, now: float, *, well: bool = False) -> None:
        """Take from the policy a job that it can no longer choose. ``well`` is True if the job succeeded."""
        if well:
            self._view.changes.succeeded.append(job)
        self.waits.end(job, now)
        self._core.trials.leave(job, now)
        self._core.prestart.leave(job)
        self._dated.pop(job.id, None)
        if self._eligible.pop(job.id, None) is not None and not self._view.changes.reset:
            self._view.changes.withdrawn(job)
        if job.running:
            self.ledger.release(job)
        for follower in self.quotas.leave(job):
            if not follower.command.launched:
                self._core.reconcile_later(follower)  # it may be started now
            elif follower.ready and follower.tried and not follower.held:
                self._show(follower, now)  # else it is shown once it is announced
        self.due = True

    def knows(self, job: Gang) -> bool:
        """Return True if the policy may choose ``job``."""
        return job.id in self._eligible

    def withhold(self, job: Gang, now: float) -> None:
        """Withdraw ``job`` from the policy; it may come back."""
        self.withdraw(job, now)
        self.return_later(job)

    def keep_current(self, job: Gang, now: float) -> None:
        """Assign to ``job`` the devices that it really holds; jobs that were to follow it wait again."""
        if job.running:
            self.unassign(job, now)
        for device in job.lease:
            for other in self._core.holders(device):
                if device not in other.lease:
                    self.unassign(other, now)
        shared = any(self.ledger.holders(device) for device in job.lease)
        self.assign(job, job.lease, now, shared=shared)
        self.start_again()
        self.due = True

    def learn(self, job: Gang) -> None:
        """Add the service of ``job``, which has succeeded, to the estimates that policies see."""
        self.estimates.learn(job)

    def learn_answer(self, computed: Computed) -> None:
        """Keep the answer to the policy's computation, and have the policy asked."""
        self.due |= self.computations.take(computed)

    def advanced(self, job: Gang) -> None:
        """Have the policy asked if ``job``, which has passed boundaries, is now due for a requested move."""
        self.due |= self.moves.is_due(job)

    def begun(self, job: Gang) -> None:
        """Tell the policy that ``job``, if it has devices, makes progress from now on or a known time."""
        if job.running and job.id in self._eligible and not self._view.changes.reset:
            self._view.changes.begun.append(job)
        self.due = True

    def return_later(self, job: Gang) -> None:
        """Enter, after the next plan, that ``job`` holds nothing. It was withdrawn and may come back."""
        self._withheld.append(job)
        self.due = True

    def reweigh(self, job: Gang, weight: float) -> None:
        """Give ``job`` another weight, and have the policy plan anew."""
        job.reweigh(weight)
        self._core.prestart.reweigh(job)
        self.start_again()
        self.due = True

    def ask(self, now: float) -> None:
        """Ask the policy while it is due, enter its plans in the ledger, and carry out requested moves."""
        # One failure may be of one plan: the next event makes another. Two in a row are of the policy.
        if self._back_off.failures > 1 and self._back_off.pauses(now):
            self.due = False
            self._take_back(now)
        while self.due:
            self.due = False
            self._view.now_s = self.estimates.now_s = now
            self._view.least_slice_s = self._core.switch_costs.least_slice_s()
            plan = self._plan(now)
            self._take_back(now)
            if plan is not None:
                self._adopt(plan, now)
                self._note_guarantees(now)
                self.throughput.tell()
        self.moves.carry_out_requests(now)
        self._return_stranded(now)
        for job in self.bound_jobs.planned_elsewhere(self._eligible):
            self.moves.send_home(job, now)
        self.moves.settle_on_nodes(now)
        # Where the plan has put a job that cannot be there, another job's state may be.
        self._return_stranded(now)

    def _return_stranded(self, now: float) -> None:
        """Move jobs whose state cannot be brought to its new node back to where the state is."""
        self._core.relocations.return_unplanned(now)
        while (returning := self._core.relocations.returning()) is not None:
            job, home = returning
            self.moves.carry_out(job, home, now)
            self._core.relocations.go_home(job, now)

    def _take_back(self, now: float) -> None:
        """Unassign the withheld jobs. This must follow a plan, which had to see who held the devices."""
        for job in self._withheld:
            job.unassign(now)
        self._withheld.clear()

    def _plan(self, now: float) -> Plan | None:
        """Return the policy's plan, verified. None if the policy failed or its plan is impossible."""
        plan: Plan | None = None
        self.plans += 1
        try:
            plan = ask_for_plan(self._policy, self._view)
            verify(plan, self._view, self.ledger, self._eligible)
        except PolicyError as error:
            self._complain(error, plan)
            self.start_again()
            self._back_off.failed(now)
            self.wake_s = self._back_off.until_s
            return None
        finally:
            self.computations.forget()
        self._complaint = ""
        self._back_off.succeeded()
        self._view.changes = Changes()
        return plan

    def _complain(self, error: Exception, plan: Plan | None) -> None:
        text = str(error) if isinstance(error, PolicyError) else where_raised(error)
        if text != self._complaint:
            self._complaint = text
            shown = "none" if plan is None else summary(plan)
            details = {"policy": self._policy.name, "error": text, "plan": shown}
            self._core.order(Notice("policy_failed", details=details))

    def _adopt(self, plan: Plan, now: float) -> None:
        """Enter ``plan``, which is possible, in the ledger: release first, then grant."""
        self.wake_s = None if plan.wake_at_s == inf else plan.wake_at_s
        grants: list[tuple[Start | Migrate, Gang]] = []
        for decision in plan.decisions:
            job = self._eligible[decision.job]
            if isinstance(decision, Stop):
                self._stop(job, decision.reason, now)
                continue
            if isinstance(decision, Suspend | Migrate):
                self.unassign(job, now)
            if isinstance(decision, Start | Migrate):
                grants.append((decision, job))
        for grant, job in grants:
            self.assign(job, grant.devices, now, shared=grant.shared)
            self.moves.granted(job, moved=isinstance(grant, Migrate))
        if self._policy.needs_durations and not all(job.running for job in self._eligible.values()):
            # Estimates change although nothing happens.
            self.wake_s = min(now + _ASK_AGAIN_S, inf if self.wake_s is None else self.wake_s)

    def _stop(self, job: Gang, reason: str, now: float) -> None:
        if job.spec.last_deadline_s is not None and job.guaranteed is None:
            job.guaranteed = False
        self._core.order(Notice("stopped", job.id, {"policy": self._policy.name, "reason": reason}))
        self._core.end(job, Trigger.CANCEL, reason, now)

    def _note_guarantees(self, now: float) -> None:
        """Take over the policy's decisions on guaranteed deadlines, and send a notice of each change."""
        guarantor = self._guarantor
        if guarantor is None:
            return
        for job in self._dated.values():
            try:
                granted = guarantor.guaranteed(job.id)
            except Exception as error:  # noqa: BLE001 (anybody's code, see _plan)
                self._complain(error, None)
                self.guarantees, self._guarantor = False, None
                return
            if granted is None or granted is job.guaranteed:
                continue
            what = (
                "guaranteed" if granted else "not_guaranteed" if job.guaranteed is None else "guarantee_lost"
            )
            job.guaranteed = granted
            job.history.append((now, what.replace("_", " ")))
            self._core.order(Notice(what, job.id, {"deadline_s": job.spec.last_deadline_s}))

    def use(self, cluster: Cluster) -> None:
        """Plan with the devices of ``cluster`` from now on; the policy forgets its earlier plans."""
        self.ledger.use(cluster)
        self._view.cluster = cluster
        self.start_again()
        self.due = True

    def start_again(self) -> None:
        """Have the policy start again from the whole picture: the world is not as it planned."""
        self._view.changes = self._view.changes.outdated()

    def unassign(self, job: Gang, now: float) -> None:
        """Take from ``job`` its devices in the ledger. It waits for others from now on."""
        self.ledger.release(job)
        job.unassign(now)
        self._wait(job, now)
        self._core.reconcile_later(job)

    def assign(self, job: Gang, devices: Sequence[int], now: float, *, shared: bool) -> None:
        """Enter ``devices`` in the ledger for ``job``, which has none."""
        devices = self._core.relocations.in_order(devices)
        self.ledger.grant(job, devices, shared=shared, plan=Plan())
        self.waits.end(job, now)
        job.assign(tuple(devices))
        # It makes progress once all its ranks are on the device (Core.settle), unless they still are, and
        # it trains (Core.begin).
        stays = job.state is JobState.RUNNING and job.lease == job.placement
        job.progress_from(job.counts_from(now) if stays else inf)
        self._core.reconcile_later(job)
