"""Chronus as a policy: guaranteed jobs by plans of leases, the rest by shortest remaining work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from math import floor

import msgspec

from gpuslice.errors import ConfigError
from gpuslice.sched_core.cluster import FreeDevices
from gpuslice.sched_core.job import Job
from gpuslice.sched_core.policies.target import difference
from gpuslice.sched_core.policy import Decision, Plan, Start, Stop, Suspend, View

from .allocate import Request, local_search, place_blocks, round_up
from .leases import Claim, LeasePlan, Need, meets, need_of, overbooked
from .line import Key, Line
from .planner import Planner, Solver

#: After jobs were refused, what is left is planned so soon.
_SOON_S = 1e-3


class _Question(msgspec.Struct, frozen=True):
    """The question if the last of ``needs`` can be guaranteed beside the others, from ``start_s`` on."""

    start_s: float
    needs: tuple[Need, ...]
    #: Whether that one runs on until then.
    stays: bool

    @property
    def jobs(self) -> list[str]:
        return [need.job for need in self.needs]


class _Draft(msgspec.Struct, frozen=True):
    """The needs for which the present lease is planned, while no final plan is known."""

    needs: dict[str, Need]
    late: bool


class Chronus:
    """A policy that guarantees deadlines and keeps other jobs' completion times short (SoCC 2021).

    Lease boundaries are multiples of ``lease_s``. At each, guaranteed jobs that hold the new lease get their
    devices; what is left goes to everybody else by remaining work × devices, shortest first, which is
    reconsidered with preemption every ``best_effort_lease_s`` and without it whenever devices become free.

    Where running times have to be measured first (a live scheduler), a job is admitted once its own is known;
    for that it runs at once, before all others without a guarantee, and if it must, until the next lease.
    One that needs longer than it said loses its guarantee at the next lease, and goes on without. A job that
    wants a guarantee or nothing is stopped if it cannot have one; it is never stopped later.

    Where the solver takes a while (``View.compute``), a lease begins with the greedy plan and goes on with
    the solver's; nobody loses a guarantee before that. Whom no greedy plan admits stays undecided meanwhile.

    Parameters
    ----------
    lease_s, best_effort_lease_s
        Lengths of leases with and without guarantee, in seconds.
    horizon
        Leases that a plan looks ahead.
    margin
        Factor on running times, for estimates that may be too short.
    split_round_up
        Let 10 devices on nodes of 8 be 8 + 2 instead of 16.
    solver, milp_nodes, milp_seconds
        See ``Planner``; with ``milp_seconds`` above 0 two runs may differ.

    Attributes
    ----------
    counters
        How plans were found, and how many jobs with deadlines were guaranteed one.
    """

    name = "chronus"
    needs_durations = True

    def __init__(
        self,
        *,
        lease_s: float = 1200.0,
        best_effort_lease_s: float = 600.0,
        horizon: int = 72,
        margin: float = 1.0,
        split_round_up: bool = False,
        solver: Solver = "auto",
        milp_nodes: int = 200,
        milp_seconds: float = 0.0,
    ) -> None:
        if not lease_s > 0 or not best_effort_lease_s > 0 or horizon < 1 or not margin > 0:
            raise ConfigError(
                f"lease_s={lease_s}, best_effort_lease_s={best_effort_lease_s}, horizon={horizon} and "
                f"margin={margin} must all be positive"
            )
        self._lease_s = lease_s
        self._best_effort_lease_s = best_effort_lease_s
        self._horizon = horizon
        self._margin = margin
        self._split = split_round_up
        self._planner = Planner(solver, milp_nodes, milp_seconds)
        self._guaranteed: dict[str, Job] = {}
        #: How long they were to run when they were guaranteed their deadlines, in seconds.
        self._promised_s: dict[str, float] = {}
        #: Jobs with deadlines that are not guaranteed, and those of which that is yet to be decided.
        self._best_effort: set[str] = set()
        self._undecided: dict[str, Job] = {}
        #: What the solver was asked about them.
        self._questions: dict[str, _Question] = {}
        self._draft: _Draft | None = None
        #: Devices of guaranteed jobs in the present lease.
        self._leased: dict[str, tuple[int, ...]] = {}
        #: Who runs, who waits, and what nobody holds.
        self._running: dict[str, Job] = {}
        self._line = Line()
        self._free: FreeDevices
        self._boundary_s: float | None = None
        self._best_effort_boundary_s: float | None = None

    @property
    def counters(self) -> dict[str, int]:
        """Return how often plans were found in which way, and the numbers of guarantees and refusals."""
        return self._planner.counters

    @property
    def solver_version(self) -> str:
        """Return the name and version of the solver. Return "" if plans are greedy."""
        return self._planner.solver_version

    def guaranteed(self, job: str) -> bool | None:
        """Return True if the job's deadline is guaranteed, None if undecided or if it has no deadline."""
        return True if job in self._guaranteed else False if job in self._best_effort else None

    def plan(self, view: View) -> Plan:
        """Admit jobs that arrived, plan leases at their boundaries, and give out the remaining devices."""
        self._follow(view)
        if refused := self._decide(view):
            return Plan(refused, view.now_s + _SOON_S)
        now_s = view.now_s
        if not self._line:
            self._boundary_s = self._best_effort_boundary_s = self._draft = None
            return Plan()
        turn_is_over = self._best_effort_boundary_s is not None and now_s >= self._best_effort_boundary_s
        holders = self._lease(view) if self._lease_is_over(view) else self._go_on(view)
        to_measure = any(not job.running and not view.measured(job) for job in self._undecided.values())
        if holders is not None or turn_is_over or to_measure:
            if holders or (holders is not None and self._leased):
                self._free = FreeDevices(view.cluster)
                blocks = [Request(job, self._block(job, view)) for job in holders]
                self._leased = place_blocks(blocks, self._free)
                keeping = self._keeping_devices()
            else:
                keeping = self._others()
            decisions = self._reassign(view, keeping)
        else:
            newcomers = self._line.shortest(self._free.total)
            decisions = difference(sorted(newcomers, key=_number), local_search(newcomers, self._free))
        self._note(decisions, view)
        self._boundary_s = _next(now_s, self._lease_s)
        self._best_effort_boundary_s = _next(now_s, self._best_effort_lease_s)
        return Plan(decisions, min(self._boundary_s, self._best_effort_boundary_s))

    def _follow(self, view: View) -> None:
        if view.changes.reset:
            # Promises are kept whatever else is forgotten, and with them the leases until the next boundary.
            self._guaranteed = {name: view.jobs[name] for name in self._guaranteed if name in view.jobs}
            self._promised_s = {name: self._promised_s[name] for name in self._guaranteed}
            self._best_effort &= view.jobs.keys()
            leased = [name for name in self._leased if name in self._guaranteed]
            self._leased = {name: self._guaranteed[name].placement for name in leased}
            self._undecided, self._questions, self._line = {}, {}, Line()
            self._running = {job.id: job for job in view.running()}
            self._free = view.free()
        for job in view.changes.finished:
            self._guaranteed.pop(job.id, None)
            self._promised_s.pop(job.id, None)
            self._undecided.pop(job.id, None)
            self._questions.pop(job.id, None)
            self._best_effort.discard(job.id)
            self._leased.pop(job.id, None)
            self._line.remove(job)
            if self._running.pop(job.id, None) is not None:
                self._free.give(job.placement)
        for job in view.jobs.values() if view.changes.reset else view.changes.arrived:
            if not job.running:
                self._line.add(job, self._key(job, view))
            if job.spec.deadlines and self.guaranteed(job.id) is None:
                self._undecided[job.id] = job

    def _note(self, decisions: Iterable[Decision], view: View) -> None:
        """Remember which jobs run and which wait once these decisions are carried out."""
        for decision in decisions:
            job = view.jobs[decision.job]
            if isinstance(decision, Start):
                self._running[job.id] = job
                self._line.remove(job)
            elif isinstance(decision, Suspend):
                del self._running[job.id]
                self._line.add(job, self._key(job, view))

    def _key(self, job: Job, view: View) -> Key:
        """Return the job's place in the best-effort order. Guaranteed jobs, which have leases, are last."""
        return (job.id in self._guaranteed, view.remaining_s(job) * job.demand, job.number)

    def _decide(self, view: View) -> list[Stop]:
        """Guarantee or refuse deadlines where that can be decided. Return stops for the refused jobs."""
        refused: list[Stop] = []
        for job in list(self._undecided.values()):
            if not view.measured(job) and view.now_s < job.spec.due_s:
                continue
            may_stay, asked = job.running and self._draft is None, self._questions.get(job.id)
            stays = may_stay and asked is not None and asked.stays
            admitted = self._admits(job, view, stays=stays)
            if admitted is False and may_stay and not stays:
                self._questions.pop(job.id, None)
                stays, admitted = True, self._admits(job, view, stays=True)
            if admitted is None:
                continue
            del self._undecided[job.id]
            self._questions.pop(job.id, None)
            if admitted:
                self._guaranteed[job.id] = job
                self._promised_s[job.id] = self._total_s(job, view)
                self._rank_again(job, view)
                if stays:
                    self._leased[job.id] = job.placement
            else:
                self._best_effort.add(job.id)
            key = "guaranteed" if admitted else "not_guaranteed"
            self.counters[key] = self.counters.get(key, 0) + 1
            if not admitted and job.spec.guaranteed and job.guaranteed is None:
                refused.append(Stop(job.id, self._why_not(job, view)))
        return refused

    def _admits(self, job: Job, view: View, *, stays: bool) -> bool | None:
        """Return True if ``job`` can be guaranteed beside all guaranteed jobs, None if not known yet."""
        start_s = view.now_s if self._lease_is_over(view) else _next(view.now_s, self._lease_s)
        others = [self._need(other, view, start_s) for other in self._guaranteed.values()]
        newcomer, capacity = self._need(job, view, start_s, stays=stays), view.cluster.size
        if any(level.before >= self._horizon for level in newcomer.levels):
            together = [*self._guaranteed.values(), job]
            if overbooked([self._claim(one, view) for one in together], capacity):
                return False
        if not newcomer.levels:
            return False
        question = _Question(start_s, (*(need for need in others if need.levels), newcomer), stays)
        asked = self._questions.setdefault(job.id, question)
        plan, known = self._planner.admission(asked.needs, capacity, view.compute)
        if not known:
            return None
        if (asked.start_s, asked.jobs) == (question.start_s, question.jobs):
            if plan is None:
                return False
            if meets(plan, question.needs, capacity):
                return True
        del self._questions[job.id]  # the world has changed meanwhile
        return self._admits(job, view, stays=stays)

    def _claim(self, job: Job, view: View) -> Claim:
        """Return the work that ``job`` must be given until its last deadline."""
        within_s = job.spec.due_s - view.now_s
        return Claim(self._block(job, view), self._work_s(job, view), within_s)

    def _why_not(self, job: Job, view: View) -> str:
        """Return the message to the owner of ``job``, which cannot be guaranteed any deadline."""
        left_s = job.spec.due_s - view.now_s
        if not view.measured(job):
            return "its deadline cannot be guaranteed: it has passed before its steps could be timed"
        return (
            f"its deadline cannot be guaranteed: it needs about {self._work_s(job, view):.0f} s within "
            f"{left_s:.0f} s on {job.demand} of {view.cluster.size} devices, in leases of "
            f"{self._lease_s:g} s and beside {len(self._guaranteed)} guaranteed jobs"
        )

    def _work_s(self, job: Job, view: View) -> float:
        return max(0.0, view.remaining_s(job)) * self._margin

    def _need(self, job: Job, view: View, start_s: float, *, stays: bool = False) -> Need:
        """Return the leases that ``job`` needs from ``start_s`` on. If ``stays``, it runs until then."""
        work_s = self._work_s(job, view)
        # Whoever has no lease may have to go before, and leases may change while a better plan is awaited.
        if stays or (job.id in self._leased and self._draft is None):
            work_s = max(0.0, work_s - max(0.0, start_s - view.now_s))
        deadlines = [(job.spec.submit_s + after_s - start_s, value) for after_s, value in job.spec.deadlines]
        block = self._block(job, view)
        return need_of(job.id, block, work_s, deadlines, lease_s=self._lease_s, horizon=self._horizon)

    def _block(self, job: Job, view: View) -> int:
        block = round_up(job.demand, max(view.cluster.node_sizes), split=self._split)
        return min(block, view.cluster.size)

    def _lease_is_over(self, view: View) -> bool:
        return self._boundary_s is not None and view.now_s >= self._boundary_s

    def _lease(self, view: View) -> list[Job]:
        """Plan leases anew, end guarantees that cannot be met, and return the first lease's holders."""
        needs = {job.id: self._need(job, view, view.now_s) for job in self._guaranteed.values()}
        for hopeless in [name for name, need in needs.items() if not need.levels]:
            del needs[hopeless]
            self._lose(hopeless, view)
        self._draft = _Draft(needs, any(not job.spec.deadlines for job in view.waiting()))
        return self._holders(view, self._finish(self._draft, view))

    def _go_on(self, view: View) -> list[Job] | None:
        """Return the jobs that hold the rest of this lease; None if the holders do not change."""
        plan = None if self._draft is None else self._finish(self._draft, view)
        if plan is not None and self._draft is None:
            return self._holders(view, plan)
        holders = [self._guaranteed[name] for name in self._leased]
        return None if all(job.running for job in holders) else holders

    def _finish(self, draft: _Draft, view: View) -> LeasePlan:
        """Return the best plan for ``draft`` so far. Drop the draft if that plan is final.

        Who runs longer than was promised of it loses the guarantee, if not all that are guaranteed can meet
        theirs.
        """
        needs, capacity = draft.needs, view.cluster.size
        while True:
            plan, last = self._planner.plan(list(needs.values()), capacity, view.compute, late=draft.late)
            overrun = self._longest_overrun(view, needs) if last and len(plan.slots) < len(needs) else None
            if overrun is None:
                break
            del needs[overrun]
            self._lose(overrun, view)
        self._draft = None if last else draft
        return plan

    def _holders(self, view: View, plan: LeasePlan) -> list[Job]:
        first = [name for name, slots in plan.slots.items() if 0 in slots]
        return [view.jobs[name] for name in first if name in self._guaranteed]

    def _rank_again(self, job: Job, view: View) -> None:
        """Give ``job`` a new key after it gained or lost its guarantee."""
        if job in self._line:
            self._line.add(job, self._key(job, view))

    def _lose(self, name: str, view: View) -> None:
        """Take the guarantee from the job."""
        self._rank_again(self._guaranteed.pop(name), view)
        del self._promised_s[name]
        self._best_effort.add(name)
        self.counters["guarantee_lost"] = self.counters.get("guarantee_lost", 0) + 1

    def _longest_overrun(self, view: View, names: Iterable[str]) -> str | None:
        """Return the guaranteed job that exceeds its promised time and margin by most, if one does."""
        overruns_s = {
            name: self._total_s(job, view) - self._promised_s[name] * max(1.0, self._margin)
            for name in names
            if (job := self._guaranteed.get(name)) is not None
        }
        name = max(overruns_s, key=lambda name: overruns_s[name], default=None)
        return name if name is not None and overruns_s[name] > _SOON_S else None

    def _total_s(self, job: Job, view: View) -> float:
        """Return how long the whole of ``job`` runs on dedicated devices, in seconds."""
        return job.progress_at(view.now_s) + view.remaining_s(job)

    def _others(self) -> dict[str, Job]:
        """Return the running jobs that hold no lease."""
        return {name: job for name, job in self._running.items() if name not in self._leased}

    def _keeping_devices(self) -> dict[str, Job]:
        """Return the running jobs whose devices no new lease takes. Their devices are no longer free."""
        keeping = {name: job for name, job in self._others().items() if self._free.has(job.placement)}
        for job in keeping.values():
            self._free.take(job.placement)
        return keeping

    def _reassign(self, view: View, keeping: Mapping[str, Job]) -> list[Decision]:
        """Return decisions that give out what leases leave. ``keeping`` may keep their devices."""
        for name in self._leased:
            self._line.remove(view.jobs[name])
        room = self._free.total + sum(len(job.placement) for job in keeping.values())
        chosen = self._line.shortest(room, [(self._key(job, view), job) for job in self._others().values()])
        leaving = {**keeping}
        target = dict(self._leased)
        for job in chosen:
            if leaving.pop(job.id, None) is not None:
                target[job.id] = job.placement
        for job in leaving.values():
            self._free.give(job.placement)
        target.update(local_search([job for job in chosen if job.id not in target], self._free))
        started = (view.jobs[name] for name in target if name not in self._running)
        changed = [job for job in self._running.values() if target.get(job.id) != job.placement]
        return difference(sorted(chain(changed, started), key=_number), target)


def _number(job: Job) -> int:
    return job.number


def _next(now_s: float, step_s: float) -> float:
    """Return the first multiple of ``step_s`` after ``now_s``."""
    return (floor(now_s / step_s) + 1) * step_s
