"""The event loop: arrivals, completions and wake times around a policy. No time steps.

At one instant completions come first, then arrivals, then one plan. Time is a float of seconds, exact for
whole seconds up to 2**53.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf, isnan

from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.jobs.wait_reasons import Since, Waits
from gpuslice.sched_core.ledger import Ledger
from gpuslice.sched_core.policy import (
    Changes,
    Migrate,
    Plan,
    Policy,
    PolicyError,
    Shares,
    Start,
    Stop,
    Suspend,
    View,
)
from gpuslice.sched_core.policy_calls import ask_for_plan
from gpuslice.sched_core.switch_cost_model import SWITCH_SHARE
from gpuslice.sched_core.traces.trace import Trace

from .interrupts import Interrupts
from .knowledge import TraceDistribution, TraceKnowledge
from .losses import TraceLosses
from .model import LinearSpeed, NoCost, SpeedModel, SwitchCost
from .outcome import Outcome
from .throughput import PresentSpeeds

#: How often a policy may be woken in a row, with nothing running and nothing to come, without deciding.
_PATIENCE = 1000
_PROGRESS_EVERY = 4096

Progress = Callable[[int, int], None]


class SimJob(Job):
    """A job of the simulator, with the facts that policies must not see."""

    __slots__ = (
        *("born_job_s", "busy_s", "end_s", "fair_share_s", "fragmentation_s", "granted_s", "holds"),
        *("lost_s", "switching_s", "waits_since"),
    )

    def __init__(self, spec: JobSpec, number: int, born_job_s: float) -> None:
        super().__init__(spec, number)
        #: When the present run will complete the job; infinite while it waits.
        self.end_s = inf
        #: When it got the devices it holds.
        self.granted_s = inf
        #: The engine's job-seconds clock at arrival.
        self.born_job_s = born_job_s
        #: Why it waited (``wait_reasons``).
        self.waits_since: Since | None = None
        self.fair_share_s = self.fragmentation_s = 0.0
        #: Devices it holds; of one that n jobs share, each holds 1/n.
        self.holds = 0.0
        #: Of these, device-seconds of progress and those lost to switching; and the seconds that took.
        self.busy_s = self.lost_s = 0.0
        self.switching_s = 0.0

    def settle(self, now_s: float) -> None:
        if self.running and now_s > self.since_s:
            self.busy_s += (now_s - self.since_s) * self.holds
        super().settle(now_s)


class Simulation:
    """One trace on one cluster under one policy.

    Parameters
    ----------
    trace, cluster, policy
        What runs, where, and who decides.
    speed, cost
        What is assumed of the jobs.
    keep_spans
        Record who held which devices when (``Outcome.spans``).

    Raises
    ------
    UsageError
        If some job could never run on ``cluster``.
    """

    def __init__(
        self,
        trace: Trace,
        cluster: Cluster,
        policy: Policy,
        *,
        speed: SpeedModel | None = None,
        cost: SwitchCost | None = None,
        keep_spans: bool = False,
        switch_share: float = SWITCH_SHARE,
    ) -> None:
        trace.check_fits(cluster.size)
        self.trace = trace
        self.cluster = cluster
        self.policy = policy
        self.speed = LinearSpeed() if speed is None else speed
        self.cost = NoCost() if cost is None else cost
        self.keep_spans = keep_spans
        self.switch_share = switch_share
        self._ledger = Ledger(cluster, policy.name)
        self._jobs: dict[str, SimJob] = {}
        knowledge = TraceKnowledge(trace) if policy.needs_durations else TraceDistribution(trace)
        self.view = View(cluster, self._jobs, knowledge)
        self.view.losses = TraceLosses(trace)
        self.view.throughput = PresentSpeeds()
        self.view.measures_rates = True
        self.view.switch_s = lambda job, devices: self.cost.resume_s(job)
        #: (end, number, job); stale unless ``job.end_s`` is still that end.
        self._completions: list[tuple[float, int, SimJob]] = []
        self.outcome = Outcome.empty(trace, str(cluster), cluster.size, policy.name)
        self._now_s = trace.submit_s[0]
        #: Clock that runs once per second for every unfinished job.
        self._job_s = 0.0
        self._waits = Waits(
            lambda: self._ledger.free, policy.over_share if isinstance(policy, Shares) else None
        )
        #: What a switch costs of whom: (-seconds, number), the dearest first; some have finished.
        self._switches: list[tuple[float, int]] = []

    def run(self, progress: Progress | None = None) -> Outcome:
        """Simulate until every job has ended.

        After Ctrl-C, return what is known so far.

        Parameters
        ----------
        progress
            Called now and then with the number of jobs that ended and of all jobs.

        Raises
        ------
        PolicyError
            If the policy raises, returns no plan or an impossible one, or never runs some job.
        """
        started = time.perf_counter()
        with Interrupts() as interrupts:
            self._loop(interrupts, progress)
        if interrupts.came:
            self.outcome.complete = False
            for job in self._jobs.values():
                self._note(job)
        self.outcome.promotions = getattr(self.policy, "promotions", {})
        self.outcome.counters = getattr(self.policy, "counters", {})
        self.outcome.solver = getattr(self.policy, "solver_version", "")
        self.outcome.wall_s = time.perf_counter() - started
        return self.outcome

    def _loop(self, interrupts: Interrupts, progress: Progress | None) -> None:
        submit_s, jobs, view, outcome = self.trace.submit_s, self._jobs, self.view, self.outcome
        total, arrived, idle_plans = len(submit_s), 0, 0
        wake_s: float | None = None
        while (arrived < total or jobs) and not interrupts.came:
            now_s = self._next_instant(submit_s[arrived] if arrived < total else inf, wake_s)
            if now_s == inf or idle_plans > _PATIENCE:
                raise self._starving()
            self._pass_time(now_s)
            self._complete(now_s)
            while arrived < total and submit_s[arrived] <= now_s:
                self._arrive(arrived)
                arrived += 1
            view.now_s = now_s
            view.least_slice_s = self._least_slice_s()
            plan = interrupts.call(ask_for_plan, self.policy, view)
            if plan is None:
                return
            view.changes = Changes()
            if plan.decisions:
                self._apply(plan, now_s)
            wake_s = plan.wake_at_s
            if wake_s is not None and wake_s <= now_s:
                raise PolicyError(f"policy {self.policy.name} asks at {now_s:g} to be woken at {wake_s:g}")
            self._waits.update(now_s)
            outcome.events += 1
            idle_plans = 0 if plan.decisions or self._completions or arrived < total else idle_plans + 1
            if progress is not None and not outcome.events % _PROGRESS_EVERY:
                progress(arrived - len(jobs), total)

    def _next_instant(self, arrival_s: float, wake_s: float | None) -> float:
        """Return the earliest of the next arrival, completion and wake-up.

        Return infinity if there is none.
        """
        completions = self._completions
        while completions and completions[0][2].end_s != completions[0][0]:
            heappop(completions)
        now_s = min(arrival_s, completions[0][0]) if completions else arrival_s
        return wake_s if wake_s is not None and wake_s < now_s else now_s

    def _complete(self, now_s: float) -> None:
        """End the jobs whose work is done."""
        completions = self._completions
        while completions and completions[0][0] <= now_s:
            end_s, _, job = heappop(completions)
            if job.end_s == end_s:
                self._finish(job, now_s)
                if not self.trace.failed(job.number):
                    self.view.changes.succeeded.append(job)

    def _pass_time(self, now_s: float) -> None:
        """Advance the clock that jobs share."""
        elapsed_s = now_s - self._now_s
        if elapsed_s > 0.0:
            self._now_s = now_s
            self._job_s += elapsed_s * len(self._jobs)

    def _arrive(self, number: int) -> None:
        spec = self.trace.spec(number)
        job = SimJob(spec, number, self._job_s)
        self._jobs[job.id] = job
        self._waits.begin(job, self._now_s)
        switch_s = self.cost.resume_s(job)
        if switch_s > 0 and self.switch_share > 0:
            heappush(self._switches, (-switch_s, number))
        if not self.view.changes.reset:
            self.view.changes.arrived.append(job)

    def _least_slice_s(self) -> float:
        """Return how long slices must be for switching to take at most its share, as live."""
        switches, finish_s = self._switches, self.outcome.finish_s
        while switches and not isnan(finish_s[switches[0][1]]):
            heappop(switches)
        return -switches[0][0] / self.switch_share if switches else 0.0

    def _apply(self, plan: Plan, now_s: float) -> None:
        """Release first, then grant. The ledger refuses what is impossible."""
        self._ledger.check_names(plan)
        grants: list[tuple[Start | Migrate, SimJob, float]] = []
        for decision in plan.decisions:
            running = None if isinstance(decision, Stop) else not isinstance(decision, Start)
            job = self._ledger.check(self._jobs, decision.job, plan, running=running)
            if isinstance(decision, Start):
                grants.append((decision, job, self._resume_s(job)))
            elif isinstance(decision, Migrate):
                moves = decision.devices != job.placement
                job.migrations += moves
                # Who stays has at most to end the resume that it is in.
                resume_s = self._resume_s(job) if moves else max(0.0, job.since_s - now_s)
                self._release(job, now_s)
                grants.append((decision, job, resume_s))
            elif isinstance(decision, Suspend):
                self._release(job, now_s)
                job.preemptions += 1
            else:
                self.outcome.stopped[job.number] = True
                self._finish(job, now_s)
        for grant, job, resume_s in grants:
            self._grant(job, grant, plan, now_s, resume_s)

    def _resume_s(self, job: SimJob) -> float:
        return 0.0 if job.first_start_s is None else self.cost.resume_s(job)

    def _grant(self, job: SimJob, grant: Start | Migrate, plan: Plan, now_s: float, resume_s: float) -> None:
        self._ledger.grant(job, grant.devices, shared=grant.shared, plan=plan)
        self._waits.end(job, now_s)
        job.placement = grant.devices
        job.holds = self._held_by(job)
        if job.first_start_s is None:
            job.first_start_s = self.outcome.first_start_s[job.number] = now_s
        job.switching_s += resume_s
        job.lost_s += resume_s * job.holds
        job.running = True
        job.epoch += 1
        job.granted_s = now_s
        job.since_s = now_s + resume_s
        self._set_rate(job, now_s)
        for neighbour in self._neighbours(job) if grant.shared else ():
            self._set_rate(neighbour, now_s)

    def _release(self, job: SimJob, now_s: float) -> None:
        """Take its devices from ``job``, which waits from now on."""
        if now_s < job.since_s:
            job.switching_s -= job.since_s - now_s
            job.lost_s -= (job.since_s - now_s) * job.holds
        job.settle(now_s)
        if self.keep_spans:
            self.outcome.spans.add(job.number, job.granted_s, now_s, job.placement)
        neighbours = self._neighbours(job)
        self._ledger.release(job)
        job.running = False
        job.since_s = now_s
        job.end_s = inf
        self._waits.begin(job, now_s)
        for neighbour in neighbours:
            self._set_rate(neighbour, now_s)

    def _finish(self, job: SimJob, now_s: float) -> None:
        """End ``job``: completed, or stopped by the policy."""
        held = job.running
        if held:
            self._release(job, now_s)
        self._waits.end(job, now_s)
        job.running = held
        self._note(job)
        self.outcome.finish_s[job.number] = now_s
        life_s = now_s - job.spec.submit_s
        self.outcome.contention[job.number] = (
            (self._job_s - job.born_job_s) / life_s if life_s > 0 else len(self._jobs)
        )
        del self._jobs[job.id]
        if not self.view.changes.reset:
            self.view.changes.finished.append(job)

    def _note(self, job: SimJob) -> None:
        """Write the totals of a job's finished runs into the outcome."""
        outcome, number = self.outcome, job.number
        outcome.preemptions[number] = job.preemptions
        outcome.migrations[number] = job.migrations
        outcome.executed_s[number] = job.executed_s
        outcome.service_s[number] = job.progress_s * job.demand
        outcome.fair_share_s[number] = job.fair_share_s
        outcome.fragmented_s[number] = job.fragmentation_s
        outcome.busy_s[number] = job.busy_s
        outcome.lost_s[number] = job.lost_s
        outcome.switching_s[number] = job.switching_s

    def _held_by(self, job: SimJob) -> float:
        """Return how many devices ``job`` holds. Shared devices count in part."""
        if not self._ledger.shares(job):
            return float(len(job.placement))
        return sum(1.0 / len(self._ledger.holders(device)) for device in job.placement)

    def _neighbours(self, job: SimJob) -> list[SimJob]:
        """Return the jobs that share a device with ``job``."""
        if not self._ledger.shares(job):
            return []
        others = {
            other.number: self._jobs[other.id] for d in job.placement for other in self._ledger.holders(d)
        }
        others.pop(job.number, None)
        return list(others.values())

    def _set_rate(self, job: SimJob, now_s: float) -> None:
        """Compute how fast ``job`` runs from now on and when it will complete."""
        job.settle(now_s)
        holds = self._held_by(job)
        if now_s < job.since_s:
            job.lost_s += (job.since_s - now_s) * (holds - job.holds)
        job.holds = holds
        neighbours: Sequence[Job] = ()
        if self._ledger.shares(job):
            crowded = max(job.placement, key=lambda device: len(self._ledger.holders(device)))
            neighbours = [other for other in self._ledger.holders(crowded) if other is not job]
        job.rate = self.speed.rate(job, neighbours, self.cluster)
        left_s = self.trace.duration_s[job.number] - job.progress_s
        job.end_s = job.since_s + (left_s if job.rate == 1.0 else left_s / job.rate)
        heappush(self._completions, (job.end_s, job.number, job))

    def _starving(self) -> PolicyError:
        waiting = [job.id for job in self._jobs.values()]
        names = ", ".join(waiting[:5]) + (f" and {len(waiting) - 5} more" if len(waiting) > 5 else "")
        return PolicyError(
            f"policy {self.policy.name} never runs {names}: nothing is running and nothing else will happen",
            "check that the placement can take jobs of this size on this cluster",
        )
