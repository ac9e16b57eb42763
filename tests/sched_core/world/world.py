"""A whole world: one scheduler after another, jobs, nodes, owners and faults, until every job has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType

from gpuslice.errors import GpusliceError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import Kept

from .draws import Draws
from .ground import Ground
from .nodes import RECONNECT_S, Machine, RemoteNode, RemoteNodes
from .people import People
from .reboot import Reboot
from .rooms import RoomWatch
from .safety import Safety
from .scenario import LOST_AFTER_S, SILENT_AFTER_S, JobPlan, Outage, Scenario
from .schedulers import Journal, MakeCore, Outcome, Scheduler, todays_core
from .states import Transfers

#: As in ``nodes.lease``: for so much of that time jobs may run on a node that hears nothing.
_LEASE_SHARE = 0.9
#: So long nobody may pass a boundary, once all is calm: a gang may wait 300 s for a rank that never comes.
_STANDSTILL_S = 400.0
_STANDSTILL_STEPS = 20
#: So many times the boundaries of all jobs may be passed.
_REPEATS = 6
_PROBE = "probe"


class World:
    """See above.

    Parameters
    ----------
    scenario
        What happens.
    make_core
        Makes the core of each scheduler.
    deaths
        Orders to nodes at which the scheduler dies, counted from 1: before it has carried the order out, or
        right afterwards (True).

    Attributes
    ----------
    orders
        How many orders to nodes there were so far.
    outcomes, makespan_s
        How each job has ended, and when the last command had.
    """

    def __init__(
        self,
        scenario: Scenario,
        make_core: MakeCore = todays_core,
        deaths: Mapping[int, bool] = MappingProxyType({}),
    ) -> None:
        self.ground = ground = Ground(scenario)
        self.scenario, self._make_core = scenario, make_core
        self.safety = Safety(ground)
        self.safety.own_time.state_of = lambda job: self.now.outcome(job)[:2]
        pids = count(100)
        self._machines = {
            name: Machine(ground, self.safety, name, lambda: next(pids)) for name in scenario.nodes
        }
        self._deaths, self.orders = deaths, 0
        self._down: set[str] = set()
        self._losses = count()
        self._standstill_s = _STANDSTILL_S + _STANDSTILL_STEPS * max(plan.step_s for plan in scenario.jobs)
        self._journal = Journal()
        self._transfers: dict[str, int] = {}
        self.people = People(self)
        #: True while all jobs are parked and ended for a reboot.
        self.keeping = False
        self.outcomes: dict[str, Outcome] = {}
        self.makespan_s = 0.0
        self.scheduler: Scheduler | None = None
        self._begin_scheduler()
        if scenario.prestart is not None:
            self.now.limit_prestart(scenario.prestart)
        self.people.begin()
        self.room_watch = RoomWatch(self)
        self.room_watch.begin()
        for outage in scenario.outages:
            ground.loop.at(outage.from_s, lambda outage=outage: self._cut_off(outage))
        for when_s, away_s in scenario.restarts:
            ground.loop.at(when_s, self._end_scheduler)
            ground.loop.at(when_s + away_s, self._begin_scheduler)
        for when_s, away_s in scenario.reboots:
            reboot = Reboot(self, away_s, self._end_scheduler, self._begin_scheduler)
            ground.loop.at(when_s, self.people.when_served(reboot.begin))

    @property
    def now(self) -> Scheduler:
        """The present scheduler, of which there must be one."""
        assert self.scheduler is not None
        return self.scheduler

    @property
    def serves(self) -> bool:
        """True if there is a scheduler, and it accepts requests."""
        return self.scheduler is not None and not self.keeping

    def run(self) -> None:
        """Live until every job has ended; then see that no device is taken.

        Raises
        ------
        Violation
            If something has happened that must not, or nothing happens any more that must.
        """
        moments_s = [plan.spec.submit_s for plan in self.scenario.jobs]
        moments_s += [wish.when_s for wish in self.scenario.wishes]
        moments_s += [window.when_s + window.for_s for window in self.scenario.windows]
        moments_s += [change.when_s for change in self.scenario.changes]
        calm_s = self.scenario.calm_s if self.scenario.faults else max(moments_s)
        self.ground.loop.at(calm_s, lambda: None)
        while self.ground.loop.now_s < calm_s:
            self._step()
        self.people.release()
        most = self.ground.record.boundaries + _REPEATS * sum(
            (plan.boundaries + 1) * plan.spec.ranks * plan.trainings for plan in self.scenario.jobs
        )
        self._until(lambda: all(self.now.outcome(job).ended for job in self.people.submitted), most)
        self.outcomes = {job: self.now.outcome(job) for job in self.people.submitted}
        ends_s = [entry.when_s for entry in self.ground.record.entries if entry.what == "command ended"]
        self.makespan_s = max(ends_s, default=0.0)
        for job, outcome in self.outcomes.items():
            in_time = outcome.failure != "time_limit"
            self.safety.judged(job, outcome.state == "failed", outcome.restarts, in_time=in_time)
        states = {job: outcome.state for job, outcome in self.outcomes.items()}
        for plan in self.scenario.jobs:
            self.safety.own_time.judged(plan, states)
        self._probe()

    def _until(self, done: Callable[[], bool], most: int) -> None:
        record, loop = self.ground.record, self.ground.loop
        record.progress_s = loop.now_s
        left: list[str] = []
        while self.scheduler is None or not done():
            if self.scheduler is not None:
                left = [job for job in self.people.submitted if not self.now.outcome(job).ended]
            if not self._step() or loop.now_s > record.progress_s + self._standstill_s:
                raise record.violated("jobs wait for ever", *map(self._fate, left))
            if record.boundaries > most:
                raise record.violated("jobs do not get on", *map(self._fate, left))

    def _fate(self, job: str) -> object:
        return job if self.scheduler is None else (job, self.now.outcome(job))

    def _step(self) -> bool:
        stepped = self.ground.loop.step()
        self.ground.record.check()
        return stepped

    def _probe(self) -> None:
        """Have a job train on all devices: none of them is still taken."""
        record, size = self.ground.record, len(self.scenario.devices)
        if left := self.safety.left_over():
            raise record.violated("processes are left", *left)
        spec = JobSpec(id=_PROBE, submit_s=self.ground.loop.now_s, devices=size, boundary_timeout_s=0.0)
        self.people.submit(JobPlan(spec, boundaries=3, step_s=0.1))
        self._until(lambda: self.now.outcome(_PROBE).ended, record.boundaries + 4 * size)
        if self.now.outcome(_PROBE).state != "succeeded":
            raise record.violated("a device is taken", self.now.outcome(_PROBE))

    # Schedulers and nodes.

    def _begin_scheduler(self) -> None:
        if self.scheduler is not None:
            return
        nodes = {name: RemoteNode(self.ground, machine) for name, machine in self._machines.items() if name}
        remote = None
        if nodes:
            transfers = Transfers(self.ground, self._down.__contains__, self._transfers)
            remote = RemoteNodes(nodes, transfers)
        self.scheduler = scheduler = Scheduler(
            self.ground, self._make_core, self._journal, self._machines[""], remote, self._dies
        )
        scheduler.seek()
        if any(job.keep for job in scheduler.core.jobs.values()):
            scheduler.handle(Kept(None))
        if scheduler is not self.scheduler:
            return  # it has died
        for name in nodes:
            if name in self._down:
                self._expect(name)
            else:
                self._reconnect(name)

    def _dies(self, done: bool) -> bool:
        """End the scheduler if it is to die at this order; return True then. Another one begins at once."""
        self.orders += not done
        if self.scheduler is None or self._deaths.get(self.orders) is not done:
            return False
        self._end_scheduler()
        self.ground.loop.after(0.0, self._begin_scheduler)
        return True

    def _end_scheduler(self) -> None:
        """The scheduler dies, and all connections with it."""
        if self.scheduler is None:
            return
        self.ground.record.note("", 0, "the scheduler ends")
        for name in self._machines:
            if (outage := self._outage(name)) is not None and outage.crashes:
                self._unseen(name)
        self.now.close()
        if (remote := self.now.remote) is not None:
            for node in remote.nodes.values():
                node.leave()
        self._machines[""].close()
        self.scheduler = None

    def _reconnect(self, name: str) -> None:
        """Have the agent of a node connect to the scheduler of now."""
        scheduler = self.scheduler
        delay_s = self.ground.draws.between(0.0, RECONNECT_S, name, "joins", next(self._losses))

        def join() -> None:
            if scheduler is not None and scheduler is self.scheduler and name not in self._down:
                assert scheduler.remote is not None
                scheduler.remote.join(scheduler.remote.nodes[name])

        self.ground.loop.after(delay_s if self.scenario.faults else 0.0, join)

    def _expect(self, name: str) -> None:
        """Take a node for silent, then for lost, if it is still down when that has lasted long enough."""
        scheduler, loss = self.scheduler, self._outage(name)

        def expired(lost: bool) -> None:
            if scheduler is not None and scheduler is self.scheduler and self._outage(name) == loss:
                assert scheduler.remote is not None
                remote = scheduler.remote
                (remote.lose if lost else remote.silence)(remote.nodes[name])

        self.ground.loop.after(SILENT_AFTER_S, lambda: expired(lost=False))
        self.ground.loop.after(LOST_AFTER_S, lambda: expired(lost=True))

    def _outage(self, name: str) -> Outage | None:
        now_s = self.ground.loop.now_s
        found = (
            o for o in self.scenario.outages if o.node == name and o.from_s <= now_s < o.from_s + o.for_s
        )
        return next(found, None)

    def _cut_off(self, outage: Outage) -> None:
        """Nothing is heard of a node; its lease ends, and at last it is back."""
        name, machine = outage.node, self._machines[outage.node]
        self.ground.record.note("", 0, "node is cut off", (name, outage.for_s, outage.crashes))
        self._down.add(name)
        for run in self.safety.runs_with(name):
            # A command that has ended unheard may be running, for all that a scheduler knows.
            if run.commands_on(name) or not self._journal.has_exit(run.job, run.attempt, name):
                run.harmed = run.absent = True
        if self.scheduler is not None and self.scheduler.remote is not None:
            node = self.scheduler.remote.nodes[name]
            if outage.stalls:
                node.stall(outage.from_s + outage.for_s)
            else:
                node.leave()
            self._expect(name)
        if outage.crashes:
            if self.scheduler is None:
                self._unseen(name)
            machine.crash()
        freezes_s = 0.0 if outage.stalls else _LEASE_SHARE * LOST_AFTER_S
        self.ground.loop.after(freezes_s, lambda: self._freeze(outage))
        self.ground.loop.after(_LEASE_SHARE * SILENT_AFTER_S, lambda: self._freeze(outage, starting=True))
        stalled = self.scheduler if outage.stalls else None
        self.ground.loop.at(outage.from_s + outage.for_s, lambda: self._come_back(name, stalled))

    def _unseen(self, name: str) -> None:
        """Count the crash of a node as failures: the next scheduler cannot tell it from the ends of ranks."""
        for run in self.safety.runs_with(name):
            run.failed = run.failed or run.absent

    def _freeze(self, outage: Outage, *, starting: bool = False) -> None:
        """Stop the jobs that may be started elsewhere: the node has no lease any more.

        ``starting``: only those that the scheduler may take back, because it has not heard of any rank.
        """
        if self._outage(outage.node) == outage:
            for command in self._machines[outage.node].commands.values():
                if command.leased and command.code is None and not (starting and command.watched):
                    command.frozen = True

    def _come_back(self, name: str, stalled: Scheduler | None) -> None:
        """Have a node answer again, over the same connection if it has only stalled."""
        self.ground.record.note("", 0, "node is back", name)
        self._down.discard(name)
        if stalled is not None and stalled is self.scheduler and stalled.remote is not None:
            node = stalled.remote.nodes[name]
            if stalled.remote.hear(node):
                for command in self._machines[name].commands.values():
                    command.thaw()
                return
            node.leave()
        self._reconnect(name)


def check(
    scenario: Scenario,
    make_core: MakeCore = todays_core,
    deaths: Mapping[int, bool] = MappingProxyType({}),
) -> World:
    """Live through ``scenario``, and return the world at its end."""
    world = World(scenario, make_core, deaths)
    try:
        world.run()
    except GpusliceError as error:
        raise world.ground.record.violated("an error", repr(error)) from error
    return world


def draw_deaths(world: World, count: int) -> list[dict[int, bool]]:
    """Return ``count`` choices of an order in ``world`` at which its scheduler dies, before or after it."""
    draws, numbers = Draws(world.scenario.seed), range(1, world.orders + 1)
    chosen = draws.sample([str(number) for number in numbers], min(count, world.orders), "deaths")
    return [{int(number): draws.chance(0.5, "death", number)} for number in chosen]
