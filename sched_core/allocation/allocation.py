"""Which job is to have which devices: eligible jobs, the policy's plan, and claims over the plan.

The plan says who has devices and where. Claims can change where: the devices that an owner wants, those
where a state can be restored, those where processes are. They are looked at in a fixed order after each plan,
and change the ledger by exchanges: whoever is displaced gets what the other job gives up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from gpuslice.sched_core.jobs.estimates import Estimates
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.losses import ReportedLosses
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.jobs.wait_reasons import Waits
from gpuslice.sched_core.lifecycle.state import State
from gpuslice.sched_core.policy import Policy, Shares, View, keeps_to_nodes, placement_of

from .bound_jobs import BoundJobs
from .deadlines import Deadlines
from .eligibility import Eligibility
from .first_jobs import FirstJobs
from .homes import Homes
from .moves import Moves
from .open_devices import OpenDevices
from .planned_devices import PlannedDevices
from .planning import Planning
from .prestart import Prestart
from .quotas import Quotas
from .starts import Starts
from .stays import Stays
from .throughput import MeasuredThroughput
from .trials import Trials
from .unfit_places import UnfitPlaces, can_be_exchanged, is_limited


class Allocation:
    """The decisions on devices, and the parts that make them.

    Parameters
    ----------
    state
        The facts that all parts of the core share.
    policy
        The policy.
    quotas
        The most devices of each tenant's jobs together, by tenant.

    Attributes
    ----------
    waits, estimates, throughput
        How long jobs wait, and for what reason; how long they run; how fast they trained.
    """

    def __init__(self, state: State, policy: Policy, quotas: Mapping[str, int]) -> None:
        self._state = state
        self._sharer = policy if isinstance(policy, Shares) else None
        self.quotas, self.estimates = Quotas(quotas), Estimates()
        self.waits = Waits(lambda: state.ledger.free, self._over_share if self._sharer else None)
        eligible: dict[str, Gang] = {}
        self._view = view = View(state.nodes.cluster, eligible, self.estimates)
        view.losses = ReportedLosses()
        view.switch_s = lambda job, at: state.switch_costs.expected_s(state.jobs[job.id], at)
        view.can_move = lambda job: can_be_exchanged(state.jobs[job.id])
        view.device_memory_bytes = state.device_memory_bytes
        self.throughput = view.throughput = MeasuredThroughput(policy, state.order)
        self.planned = PlannedDevices(state, view, self.waits)
        self.trials = Trials(state)
        self.prestart = Prestart(state, policy, self.quotas, self.waits, self.estimates)
        self.deadlines, self.starts = Deadlines(state), Starts(state)
        self.first_jobs = FirstJobs(state, self.quotas)
        view.array_bytes = self.quotas.array_bytes
        placement = placement_of(policy)
        self.homes = Homes(state, placement)
        self.stays = Stays(
            state, self.planned, keeps=keeps_to_nodes(policy), any_devices=placement == "count"
        )
        self.moves = Moves(state, self.planned, self.homes)
        self.bound_jobs = BoundJobs()
        self.open_devices = OpenDevices(state, self.planned, self.moves, self.trials)
        self.unfit_places = UnfitPlaces(state, self.planned, self.moves)
        self.eligibility = Eligibility(
            state, view, eligible, self.quotas, self.waits, self.planned, self.trials, self.prestart
        )
        self.planning = Planning(state, policy, view, self.eligibility, self.planned)

    def use_policy(self, policy: Policy, now: float) -> None:
        """Have ``policy``, which is new, plan from now on for all jobs as they are."""
        self.learn(now)
        self._sharer = policy if isinstance(policy, Shares) else None
        jobs = [job for job in self._state.jobs.values() if not job.state.ended]
        self.waits.change(self._over_share if self._sharer else None, jobs, now)
        self.throughput.use_policy(policy)
        self.prestart.use_policy(policy)
        placement = placement_of(policy)
        self._state.nodes.spread = placement == "spread"
        self.homes.use_placement(placement)
        self.stays.change(now, keeps=keeps_to_nodes(policy), any_devices=placement == "count")
        for job in jobs:
            self.stays.look_at(job, now)
        self.planning.use_policy(policy, now)

    def enter(self, job: Gang, now: float) -> None:
        """Take over ``job``, which has been submitted."""
        self._state.nodes.restrict(job)
        self.deadlines.add(job)
        self._state.reconcile_later(job)
        self.starts.add(job, now)

    def learn(self, now: float) -> None:
        """Look at all that the life cycle of jobs has changed since the last call."""
        while self._state.has_news:
            for news, job in self._state.take_news():
                self.eligibility.hear(news, job, now)
            for job in self._state.take_touched():
                self._look_at(job, now)

    def _look_at(self, job: Gang, now: float) -> None:
        """Take over what has changed of ``job``."""
        self.open_devices.look_at(job)
        self.first_jobs.look_at(job, now)
        if self.eligibility.look_at(job, now):
            self.moves.forget(job)
            if job.state is JobState.SUCCEEDED:
                self.estimates.learn(job)
        if job.state.ended:
            self.deadlines.judge(job, now)
            self.starts.look_at(job, now)
        if job.bound:
            self.bound_jobs.add(job)
        if is_limited(job):
            self.unfit_places.add(job)
        self.homes.look_at(job)
        self.moves.look_at(job)
        self.stays.look_at(job, now)

    def use_nodes(self, returned: Sequence[Gang], now: float) -> None:
        """Plan with the nodes that answer now, and keep jobs away from those that do not.

        Jobs with processes on a silent node are withdrawn from the policy, and keep what they have. Other
        jobs that were to have devices there wait. ``returned`` are jobs whose nodes answer again: the plan
        has them where they are.
        """
        state = self._state
        for job in [job for job in state.jobs.values() if not job.state.ended] if state.nodes.silent else ():
            self._keep_away(job, now)
        self._use_cluster(now)
        for job in returned:
            if job.lease and job.shown and not job.running:
                self.planned.keep_lease(job, now)
        self.planned.plan_anew()

    def use_room(self, job: Gang, no_room: Mapping[int, str]) -> None:
        """Plan with the nodes that have room for the state of ``job``: all but those of ``no_room``."""
        job.relocation.find_room(no_room)
        self._state.nodes.restrict(job)
        self._state.nodes.confine(job)
        self._state.touch(job)
        self.planned.plan_anew()

    def use_open_devices(self, now: float) -> None:
        """Plan with the devices that are open now. Jobs leave those that are closed to them."""
        self.open_devices.change(now)
        self._use_cluster(now)
        self.planned.plan_anew()

    def _use_cluster(self, now: float) -> None:
        """Have the policy plan for the devices that can be had now. No job has others by the plan."""
        self.learn(now)
        self._view.cluster = self._state.nodes.cluster
        self._state.ledger.use(self._state.nodes.cluster)

    def _keep_away(self, job: Gang, now: float) -> None:
        """Take from ``job`` whatever it has to do with silent nodes: devices, a trial or a requested move."""
        nodes = self._state.nodes
        if nodes.any_silent(nodes.of(job.requested_devices)):
            self.moves.forget(job)
            job.history.append((now, "not to be moved: a node is silent"))
        if nodes.cut_off(job):
            return
        if nodes.any_silent(nodes.of(job.borrowed)):
            self.trials.leave(job, now)
            self.trials.enter(job)
        if job.running and nodes.any_silent(nodes.of(job.placement)):
            self.planned.unassign(job, now)

    def reweigh(self, job: Gang, weight: float) -> None:
        """Give ``job`` another weight, and have the policy plan anew."""
        job.reweigh(weight)
        self.prestart.reweigh(job)
        self.planned.plan_anew()

    def adjust(self, job: Gang, changes: Mapping[str, float]) -> None:
        """Change fields of what was asked for ``job``, and have the policy plan anew."""
        job.adjust(changes)
        self.prestart.adjust(job)
        self.planned.plan_anew()

    def decide(self, now: float) -> None:
        """Ask the policy if that is due, and let claims change where jobs are to be."""
        state = self._state
        state.plan_due |= self.moves.retry_is_due()
        if state.plan_due:  # so the event is in the journal, which leaves out heartbeats without a plan
            self.stays.end_due(now)
        if self.planning.pauses(now):
            state.plan_due = False
            self.eligibility.take_back(now)
        while state.plan_due:
            state.plan_due = False
            self.estimates.now_s = now
            self.planning.ask(now)
            for job, moved in self.planning.granted:
                self.moves.granted(job, moved=moved)
            self.throughput.tell()
            self.learn(now)
        self._apply_claims(now)
        self.trials.update(now)
        self.stays.note_idle(now)

    def _apply_claims(self, now: float) -> None:
        """Change where jobs are to be: what their owners want, where states are, where processes are."""
        self.moves.carry_out_requests(now)
        self._return_stranded(now)
        for job in self.bound_jobs.away_from_home():
            self.moves.send_home(job, now)
        self.unfit_places.leave(now)
        self.moves.settle_on_nodes(now)
        # Where the plan has put a job that cannot be there, another job's state may be.
        self._return_stranded(now)

    def _return_stranded(self, now: float) -> None:
        """Move jobs whose state cannot be brought to its new node back to where the state is."""
        self.homes.return_unplanned(now)
        while (returning := self.homes.returning()) is not None:
            job, home = returning
            self.moves.carry_out(job, home, now)
            self.homes.go_home(job, now)

    def start_ahead(self, now: float) -> None:
        """Start processes of jobs whose turn is near."""
        self.prestart.update(now)

    def due_s(self) -> float:
        """Return when a decision is due even if nothing happens; infinite if none is."""
        wake_s = self.planning.wake_s
        planned_s = inf if wake_s is None else wake_s
        parts = (self.deadlines, self.starts, self.first_jobs, self.trials, self.prestart, self.stays)
        return min(planned_s, *(part.due_s() for part in parts))

    def _over_share(self, tenant: str, demand: int) -> bool:
        """Return True if the policy says that ``tenant`` has used up its share."""
        try:
            return self._sharer is not None and self._sharer.over_share(tenant, demand)
        except Exception as error:  # noqa: BLE001 (anybody's code, see Planning)
            self.planning.complain(error, None)
            self._sharer = None
            return False
