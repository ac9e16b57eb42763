"""Which jobs are started before their turn: a few, those that the policy would take next.

A process that waits for its first lease has imported torch and holds memory for it. So of a long queue only
some jobs are started beyond those that run. The policy itself chooses them: a second copy of it places the
jobs that have never run on slots of an imaginary cluster, and the jobs with slots are started. No job trains
on these slots, so no slice ends. A job leaves its slot with its first lease, and the next job takes the slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import chain, islice
from math import inf

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.jobs.estimates import Estimates
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.wait_reasons import Waits
from gpuslice.sched_core.lifecycle.launches import launch
from gpuslice.sched_core.lifecycle.state import State
from gpuslice.sched_core.policy import (
    Changes,
    Migrate,
    Plan,
    Policy,
    PolicyError,
    Start,
    Stop,
    Suspend,
    Task,
    View,
)
from gpuslice.sched_core.policy_calls import ask_for_plan
from gpuslice.sched_core.priorities import Priorities

from .quotas import Quotas

#: A job that was started and has not said Hello for so long may be no training at all. Its place is given up.
HELLO_TIMEOUT_S = 60.0
#: How often the copy of the policy is asked again because jobs of higher priority have taken slots.
_MOST_ROUNDS = 8


class Prestart:
    """The jobs that wait for their first lease, and which of them are started.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    policy
        The policy to copy. It has not made a plan yet.
    quotas, waits, estimates
        The tenants' quotas, the stopwatches of jobs that wait, and how long jobs run.

    Attributes
    ----------
    limit
        How many jobs may be started beyond those that run. None: every job is started at once.
    """

    def __init__(
        self, state: State, policy: Policy, quotas: Quotas, waits: Waits, estimates: Estimates
    ) -> None:
        self._state, self._quotas, self._waits, self._estimates = state, quotas, waits, estimates
        self.limit: int | None = None
        #: Jobs that wait for a first lease, in order of arrival, and those of them that are not started.
        self._line: dict[str, Gang] = {}
        self._unstarted: dict[str, Gang] = {}
        #: When each started job of the line was started.
        self._started_s: dict[str, float] = {}
        #: Jobs that were started because devices stand idle and wait for them.
        self._coming: dict[str, Gang] = {}
        #: Jobs to start before all others: for a trial, or for the policy to stop them as the copy did.
        self._first: dict[str, Gang] = {}
        #: Jobs that the copy of the policy has given slots.
        self._next: dict[str, Gang] = {}
        #: The stand-ins that the copy of the policy sees, by the id of their job.
        self._twins: dict[str, Gang] = {}
        self._view = View(Cluster([1]), self._twins)
        self._copy_policy(policy)

    def _copy_policy(self, policy: Policy) -> None:
        #: The copy of the policy. None if it cannot be copied, or has failed: then the oldest job is next.
        copied = _copy(policy)
        self._policy = None if copied is None else Priorities(copied)

    def use_policy(self, policy: Policy) -> None:
        """Have a copy of ``policy``, which is new, say from now on which jobs come next."""
        self._copy_policy(policy)
        self._empty_slots(self._view.cluster.size)

    def set_limit(self, limit: int) -> None:
        """Start at most ``limit`` jobs beyond those that run, from now on."""
        slots = max(len(self._state.devices), limit)
        if self.limit is None or slots != self._view.cluster.size:
            self._empty_slots(slots)
        self.limit = limit

    def _empty_slots(self, slots: int) -> None:
        """Have the copy of the policy choose anew which jobs come next, for so many slots."""
        self._view = View(Cluster([slots]), self._twins, self._estimates)
        self._view.compute = _not_now
        self._next.clear()
        for twin in self._twins.values():
            twin.unassign(twin.spec.submit_s)

    def offer(self, job: Gang, now: float) -> None:
        """Put ``job`` in line to be started when its turn comes; start it at once if there is no limit.

        Nothing happens if it was started, is held or kept, may not start yet, is shut out or has ended. Over
        its tenant's quota it waits for the quota first.
        """
        waits = job.held or job.keep or job.conditions.unmet or job.shut_out
        if job.command.launched or waits or job.state.ended:
            return
        if job.id in self._line:
            if job.id not in self._started_s:
                return
            self.leave(job)  # no node that it may be on answered
        if self.limit is None:
            launch(self._state, job, now)
            return
        if job.tried and self._quotas.keeps_out(job):
            self._waits.begin(job, now, quota=True)
            return
        self._waits.begin(job, now, unstarted=True)
        self._line[job.id] = self._unstarted[job.id] = job
        if job.tried:
            self._twins[job.id] = twin = _twin(job, now)
            if not self._view.changes.reset:
                self._view.changes.arrived.append(twin)
        else:
            self._first[job.id] = job

    @property
    def started(self) -> list[str]:
        """The ids of the jobs that were started and wait for their first lease."""
        return list(self._started_s)

    def leave(self, job: Gang) -> None:
        """Remove ``job`` from the line: it has its first lease, or is not to be waited for any more."""
        if self._line.pop(job.id, None) is None:
            return
        self._unstarted.pop(job.id, None)
        self._started_s.pop(job.id, None)
        self._coming.pop(job.id, None)
        self._forget(job)

    def reweigh(self, job: Gang) -> None:
        """Show the new weight of ``job`` to the copy of the policy, which then plans anew."""
        if (twin := self._twins.get(job.id)) is not None:
            twin.reweigh(job.spec.weight)
            self._view.changes = Changes(reset=True)

    def adjust(self, job: Gang) -> None:
        """Show what is asked for ``job`` now to the copy of the policy, which then plans anew."""
        if (twin := self._twins.get(job.id)) is not None:
            twin.adjust({"weight": job.spec.weight, "priority": job.spec.priority})
            self._view.changes = Changes(reset=True)

    def update(self, now: float) -> None:
        """Start the jobs whose turn is near; give up jobs that were started and have been silent too long."""
        for started in [self._line[name] for name in self._started_s]:
            if started.lease:
                self.leave(started)
        if self.limit is None:
            return
        for name in [name for name, since_s in self._started_s.items() if since_s + HELLO_TIMEOUT_S <= now]:
            if not self._line[name].ready:
                self.leave(self._line[name])
        self._ask(now)
        free = self._state.ledger.free
        while sum(job.demand for job in self._coming.values() if self._can_use(job)) < free and (
            job := self._foremost()
        ):
            self._start(job, now)
            self._forget(job)
            self._coming[job.id] = job
            self._ask(now)
        # Another job may have been ready sooner and have the device that a job was started for.
        early = 0
        for job in self._coming.values():
            early += free <= 0
            free -= job.demand
        for job in list(islice(self._in_order(), max(0, self.limit - early))):
            self._start(job, now)

    def due_s(self) -> float:
        """Return when the next started job will have been silent for too long; infinite if there is none."""
        silent = (since_s for name, since_s in self._started_s.items() if not self._line[name].ready)
        return min(silent, default=inf) + HELLO_TIMEOUT_S

    def _can_use(self, job: Gang) -> bool:
        """Return False if no node that is fit for ``job`` has a free device for it."""
        if not job.command.not_for:
            return True
        on, holders = self._state.nodes.cluster.on, self._state.ledger.holders
        return any(not holders(device) for node in self._state.nodes.fitting(job) for device in on(node))

    def _in_order(self) -> Iterator[Gang]:
        """Yield the jobs to start next, in order, without those that an idle device waits for."""
        return chain(self._first.values(), self._next.values())

    def _foremost(self) -> Gang | None:
        """Return the job to start for an idle device, or None if there is none.

        If the copy of the policy names no job, and no started job waits, it is the oldest in line.
        """
        others = () if self._started_s else self._unstarted.values()
        return next(chain(self._in_order(), others), None)

    def _start(self, job: Gang, now: float) -> None:
        if self._unstarted.pop(job.id, None) is None:
            return
        self._started_s[job.id] = now
        self._waits.end(job, now)
        launch(self._state, job, now)

    def _forget(self, job: Gang) -> None:
        """Remove ``job`` from the jobs to start next, and from the copy of the policy."""
        self._first.pop(job.id, None)
        self._next.pop(job.id, None)
        if (twin := self._twins.pop(job.id, None)) is not None and not self._view.changes.reset:
            self._view.changes.withdrawn(twin)

    def _ask(self, now: float, again: int = _MOST_ROUNDS) -> None:
        """Ask the copy of the policy which jobs come next, if any job came or left.

        It is asked up to ``again`` times more if jobs of higher priority took slots of others.
        """
        changes = self._view.changes
        if not (changes.reset or changes.arrived or changes.finished):
            return
        plan = Plan()
        if self._policy is not None:
            self._view.now_s = now
            try:
                plan = ask_for_plan(self._policy, self._view)
            except PolicyError:  # the failures of the real one are reported
                self._policy = None
        self._view.changes = Changes()
        if self._policy is None:
            ours = islice(self._twins, self._view.cluster.size)
            self._next = {name: self._line[name] for name in ours}
            return
        for decision in plan.decisions:
            twin, job = self._twins.get(decision.job), self._line.get(decision.job)
            if twin is None or job is None:
                continue
            if isinstance(decision, Suspend):
                twin.unassign(now)
                self._next.pop(job.id, None)
            elif isinstance(decision, Start | Migrate):
                # It never makes progress here, so it is never to be suspended for what it had.
                twin.assign(tuple(decision.devices))
                twin.progress_from(inf)
                self._next[job.id] = job
            elif isinstance(decision, Stop):
                self._forget(job)
                self._first[job.id] = job
        if self._policy.unfinished and again:
            self._view.changes = Changes(reset=True)
            self._ask(now, again - 1)


def _twin(job: Gang, now: float) -> Gang:
    """Return a stand-in for ``job``, with its service and progress, for the copy of the policy."""
    twin = Gang(job.spec, job.number, job.program)
    twin.executed_s, twin.service_s, twin.progress_s = job.executed_s, job.service_s, job.progress_s
    twin.first_start_s, twin.since_s = job.first_start_s, now
    return twin


def _copy(policy: Policy) -> Policy | None:
    """Return a copy of ``policy``, or None if it cannot be copied."""
    try:
        return deepcopy(policy)
    except Exception:  # noqa: BLE001 (a policy may be anybody's code)
        return None


def _not_now(task: Task) -> bytes | None:
    """Return None: ``task`` is not computed. The next job to start is not worth seconds of computing."""
    return None
