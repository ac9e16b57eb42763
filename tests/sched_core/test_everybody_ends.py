"""Whatever has happened: once all do as they are told, every job ends, and no device stays taken.

``GPUSLICE_ENDS`` is the seed of the first world; ``./x soak ends`` lives through others.
"""

from __future__ import annotations

import os
from itertools import count
from random import Random
from typing import Any

import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError, UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Brought,
    Command,
    Event,
    Exited,
    Held,
    Kill,
    Limited,
    Moved,
    NodeFound,
    NodeLost,
    Notice,
    RankGone,
    Released,
    Reported,
    StateWaits,
    Submitted,
    Tell,
    Weighted,
    Woken,
)
from gpuslice.sched_core.lifecycle.rank_orders import NEVER
from gpuslice.sched_core.placement.registry import make_placement
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Migrate, Plan, Policy, Start, Suspend, View

from .driver import PROGRAM, Driver, picture, refused

JOBS = "abcdef"
POLICIES = ("erratic", "erratic", "rr", "2das", "gittins", "gandiva", "optimus", "themis", "tetris")
STEPS = 150
#: In seconds of the core's clock, one boundary each: more than all jobs together need one after the other.
PATIENCE = 1500
BOUNDARIES = 40
FIRST = int(os.environ.get("GPUSLICE_ENDS", "0"))
WORLDS = 25 if "GPUSLICE_ENDS" in os.environ else 12


class Erratic:
    """Starts, moves and suspends jobs as it likes; calm, it starts what there is room for."""

    name = "erratic"
    needs_durations = False

    def __init__(self, seed: int, placement: str) -> None:
        self.placement = make_placement(placement) if placement else None
        self.calm = False
        self._seed = seed
        self._plans = 0

    def plan(self, view: View) -> Plan:
        self._plans += 1
        draw = Random(f"{self._seed}-{self._plans}")  # the same plans when the journal is replayed
        free = {device for node in view.free().on_node for device in node}
        jobs = view.jobs.values()
        leaving = [job for job in jobs if job.running and not self.calm and draw.random() < 0.25]
        waiting = [job for job in jobs if not job.running and (self.calm or draw.random() < 0.7)]
        for job in leaving:
            free |= set(job.placement)
        draw.shuffle(waiting)
        decisions: list[Start | Suspend | Migrate] = []
        for job in [*leaving, *waiting]:
            size, there = draw.randint(job.least, job.most), sorted(free)
            if job.within:
                on_nodes = [[d for d in there if view.cluster.node_of[d] == node] for node in job.within]
                there = draw.choice([found for found in on_nodes if len(found) >= job.least] or [[]])
                size = min(size, len(there))
            if len(there) >= size >= job.least and draw.random() < 0.8:
                devices = tuple(draw.sample(there, size))
                free -= set(devices)
                decisions.append((Migrate if job.running else Start)(job.id, devices))
            elif job.running:
                decisions.append(Suspend(job.id))
        return Plan(decisions, wake_at_s=view.now_s + draw.choice([0.5, 1.0, 3.0]))


class World:
    """A core, and ranks, owners, commands and nodes that do anything, until they `cooperate`."""

    def __init__(self, seed: int, policy: str = "") -> None:
        self.draw = draw = Random(seed)
        self.nodes = draw.choice([("",), ("",), ("", "n1"), ("", "n1", "n2")])
        self.seed, self._policy = seed, draw.choice([policy] if policy else POLICIES)
        options: dict[str, Any] = {
            "quotas": {"t": 2} if draw.random() < 0.3 else None,
            "device_memory_bytes": draw.choice([0, 8]),
        }
        self._placement = draw.choice(["", "count", "spread"])
        self.policy = self.make_policy()
        self.driver = Driver(draw.choice([1, 2, 3]), self.policy, self.nodes, **options)
        self.core = self.driver.core
        #: What ranks were told and have not done, and jobs whose command was told to end.
        self.orders: dict[tuple[str, int], list[Any]] = {}
        self.ending: set[str] = set()
        self._pids = count(100)
        #: How often the command of each job trains, once all do as they are told.
        self.trainings = {job: draw.choice([1, 1, 2, 3]) for job in JOBS}

    def make_policy(self) -> Policy:
        if self._policy == "erratic":
            return Erratic(self.seed, self._placement)
        return make_policy(self._policy, {})

    def attempt(self, event: Event) -> None:
        before = picture(self.core)
        try:
            commands = self.driver.do(event)
        except (IllegalTransitionError, UsageError):
            assert picture(self.core) == before
            return
        self.note(commands)

    def note(self, commands: list[Command]) -> None:
        """Keep what ranks and commands were told."""
        for command in commands:
            if isinstance(command, Tell) and isinstance(command.message, wire.Replaced):
                self.orders.pop((command.job, command.rank), None)
            elif isinstance(command, Tell) and not command.pid:
                self.orders.setdefault((command.job, command.rank), []).append(command.message)
            elif isinstance(command, Kill):
                self.ending.add(command.job)
            elif isinstance(command, Notice):
                assert command.what != "policy_failed", command.details

    def anything(self) -> None:
        """Something happens."""
        draw, job = self.draw, self.draw.choice(JOBS)
        self.driver.now_s += draw.choice([0.0, 0.0, 0.01, 0.1, 0.5])
        gang = self.core.jobs.get(job)
        if gang is None:
            return self.submit(job) if draw.random() < 0.2 else None
        told = sorted(key for key, orders in self.orders.items() if orders)
        happens = draw.choices(
            ("answers", "comes", "trains", "dies", "time", "wish", "node"), (25, 15, 15, 12, 14, 6, 4)
        )[0]
        if happens == "answers" and told:
            self.answer(*draw.choice(told))
        elif happens == "comes" and gang.command.stage is Stage.BRINGING:
            errors = ("", "", "No space left on device")
            answers = (
                StateWaits(job, gang.attempt, "n1", "no answer"),
                Brought(job, gang.attempt, draw.choice(errors)),
            )
            self.attempt(draw.choice(answers))
        elif happens == "comes":
            self.come(gang, all_of_them=draw.random() < 0.7)
            if draw.random() < 0.2:  # another one at the same time, or a child that trains in its place
                number = draw.randrange(len(gang.ranks))
                replaces = draw.choice([0, gang.ranks[number].pid])
                self.greet(gang, number, pid=next(self._pids), replaces=replaces)
        elif happens == "trains":
            self.train(gang, draw.choice([0, 1, 1, 2, 5]))
        elif happens == "dies" and (self.ending or draw.random() < 0.15):
            self.die(draw.choice(sorted(self.ending) or [job]), all_of_it=draw.random() < 0.8)
        elif happens == "time":
            self.driver.now_s += draw.choice([0.0, 0.5, 1.0, 3.0, 7.0])
            self.attempt(Woken())
        elif happens == "wish":
            devices = draw.sample(
                [str(d) for d in self.core.devices], min(gang.demand, len(self.core.devices))
            )
            wishes = Held(job), Released(job), Weighted(job, 2.0), Moved(job, tuple(devices))
            self.attempt(draw.choice(wishes))
        elif happens == "node" and len(self.nodes) > 1:
            self.lose_or_find(draw.choice(self.nodes[1:]))
        return None

    def submit(self, job: str) -> None:
        draw = self.draw
        kind = draw.choice(["one", "gang", "joined", "relaunched"])
        most = draw.choice([2, 3]) if kind in ("joined", "relaunched") else 0
        spec = JobSpec(
            id=job,
            submit_s=self.driver.now_s,
            devices=2 if kind == "gang" else 1,
            most_devices=most,
            relaunch=kind == "relaunched",
            tenant=draw.choice(["", "t"]),
            max_restarts=draw.choice([0, 2]),
            boundary_timeout_s=draw.choice([0.0, 2.0]),
            on_boundary_timeout="kill" if draw.random() < 0.3 else "leave",
            trial_batches=draw.choice([0, 0, 3]),
            steps=30 if self._policy == "tetris" else draw.choice([0, 30]),
            device_memory_bytes=draw.choice([0, 2, 4]),
        )
        self.attempt(Submitted(spec, PROGRAM))

    def come(self, job: Gang, *, all_of_them: bool = True) -> None:
        """Its processes greet that have not."""
        if job.command.stage is not Stage.STARTED:
            return
        absent = [rank.number for rank in job.ranks if rank.phase is RankPhase.ABSENT]
        for number in absent if all_of_them else absent[:1]:
            self.orders.pop((job.id, number), None)
            self.greet(job, number)

    def greet(self, job: Gang, number: int, **at: Any) -> None:
        """A rank connects, for the first time if it does not say where it is."""
        at.setdefault("pid", job.ranks[number].pid or next(self._pids))
        hello = wire.Hello(version=1, job=job.id, rank=number, world_size=len(job.ranks), **at)
        self.attempt(Reported(job.id, number, hello))

    def train(self, job: Gang, boundaries: int) -> None:
        newest = max(rank.boundary for rank in job.ranks) + boundaries
        for rank in job.present(RankPhase.ON):
            progress = wire.Progress(epoch=job.epoch, boundary=newest, step=max(0, newest - 1))
            self.attempt(Reported(job.id, rank.number, progress))
            if job.state.ended:
                return

    def answer(self, job: str, number: int, *, well: bool = False) -> None:
        """A rank does the next thing that it was told, or says why not."""
        order, draw = self.orders[job, number].pop(0), self.draw
        gang = self.core.jobs[job]
        if number >= len(gang.ranks):
            return
        boundary, luck = gang.ranks[number].boundary, 1.0 if well else draw.random()
        answer: wire.FromAgent
        if isinstance(order, wire.Dismiss):
            self.attempt(RankGone(job, number, pid=gang.ranks[number].pid))
            return
        if isinstance(order, wire.Withdraw):
            self.attempt(Reported(job, number, wire.Withdrawn(epoch=order.epoch)))
            return
        if isinstance(order, wire.Suspend):
            if order.stop_at >= NEVER or order.epoch < gang.epoch:
                return  # it was called off
            if luck < 0.1:
                answer = refused(order.epoch, boundary, running=True)
            elif luck < 0.2 or boundary > order.stop_at:
                answer = wire.Overshot(epoch=order.epoch, boundary=max(boundary, order.stop_at))
            else:
                answer = self._suspended(order)
        elif luck < 0.1:
            answer = refused(order.epoch, boundary, running=False, retryable=draw.random() < 0.9)
        else:
            answer = wire.Resumed(epoch=order.epoch, boundary=boundary, stages_s={})
        self.attempt(Reported(job, number, answer))

    def _suspended(self, order: wire.Suspend) -> wire.Suspended:
        return wire.Suspended(
            epoch=order.epoch,
            boundary=order.stop_at,
            step=order.stop_at,
            nbytes=8,
            stages_s={},
            bound=self.draw.choice(["", "", "", "a library"]),
            restartable=self.draw.random() < 0.7,
            restartable_later=self.draw.random() < 0.5,
        )

    def die(self, name: str, *, all_of_it: bool = True, code: int | None = None) -> None:
        """Processes of the job end, and its command."""
        job, draw = self.core.jobs[name], self.draw
        attempt = job.attempt
        if not job.command.launched:
            return
        for hello in job.processes.line if all_of_it or draw.random() < 0.5 else ():
            self.attempt(RankGone(name, hello.rank, pid=hello.pid))
        for rank in list(job.there()):
            self.orders.pop((name, rank.number), None)
            self.attempt(RankGone(name, rank.number, unseen=draw.random() < 0.3, pid=rank.pid))
            if not all_of_it:
                return
        if job.command.exit_code is None and job.command.launched and job.attempt == attempt:
            self.ending.discard(name)
            ended = draw.choice([0, 1, -9, -15, 3]) if code is None else code
            self.attempt(Exited(name, ended, "MemoryError" if ended == 3 else ""))

    def lose_or_find(self, node: str) -> None:
        """The processes of a lost node are gone; those of their jobs on other nodes are told to end."""
        known = self.core.state.nodes
        if node in known.lost:
            self.attempt(NodeFound(node))
            return
        self.attempt(NodeLost(node))
        for job in list(self.core.jobs.values()):
            attempt, nodes = job.attempt, known.named(job.nodes)
            if job.processes_gone or node not in nodes:
                continue
            for rank in [rank for rank in job.there() if nodes[rank.number] == node]:
                self.orders.pop((job.id, rank.number), None)
                self.attempt(RankGone(job.id, rank.number, pid=rank.pid))
                if job.attempt != attempt:
                    break
            if job.attempt == attempt and {*nodes} == {node} and job.command.exit_code is None:
                self.ending.discard(job.id)
                self.attempt(Exited(job.id, -9, f"gpuslice: node {node} was lost"))
            elif job.attempt == attempt:
                self.ending.add(job.id)

    def cooperate(self) -> list[Gang]:
        """From now on all do as they are told; jobs that do not end all the same."""
        if isinstance(self.policy, Erratic):
            self.policy.calm = True
        for node in sorted(self.core.state.nodes.lost):
            self.attempt(NodeFound(node))
        for _ in range(PATIENCE):
            for job in [job for job in self.core.jobs.values() if job.held]:
                self.attempt(Released(job.id))  # (not while it has failed and is still to be gone)
            left = [job for job in self.core.jobs.values() if not (job.state.ended and job.processes_gone)]
            if not left:
                return []
            for job in left:
                if job.held:  # of a failed one only once its next attempt has come
                    self.attempt(Released(job.id))
            self.driver.now_s += 1.0
            self.attempt(Woken())
            for _ in range(3):
                self._obey()
            for job in left:
                self._go_on(job)
        return left

    def _obey(self) -> None:
        for name in sorted(self.ending):
            self.die(name, code=-9)
        for job in list(self.core.jobs.values()):
            if not job.state.ended:
                if job.command.stage is Stage.BRINGING:
                    self.attempt(Brought(job.id, job.attempt))
                self.come(job)
        for key in sorted(self.orders):
            while self.orders.get(key):
                self.answer(*key, well=True)

    def _go_on(self, job: Gang) -> None:
        """It trains, and ends after so many boundaries; its command then trains again, or ends as well."""
        gone = any(rank.phase in (RankPhase.GONE, RankPhase.LEAVING) for rank in job.ranks)
        if job.command.launched and (job.state.ended or gone):
            self.die(job.id, code=0)
        elif job.processes.line and not job.there():  # nobody waits for nobody
            raise AssertionError(f"{job.id}: {job.processes.line}")
        elif job.state is JobState.RUNNING:
            self.train(job, 1)
            if max((rank.boundary for rank in job.ranks), default=0) > BOUNDARIES:
                self._end_training(job)
        elif job.state is JobState.SUSPENDING and not any(
            self.orders.get((job.id, rank.number)) for rank in job.ranks
        ):
            for rank in [rank for rank in job.there() if rank.phase is RankPhase.ON]:  # it connects again
                self.greet(job, rank.number, boundary=rank.boundary, epoch=job.epoch, parked=False)

    def _end_training(self, job: Gang) -> None:
        """All of its processes end well; so does its command, if that was the last training."""
        self.trainings[job.id] -= 1
        if self.trainings[job.id] <= 0:
            self.die(job.id, code=0)
            return
        for rank in list(job.there()):
            bye = wire.Bye(epoch=job.epoch, boundary=rank.boundary, step=rank.step)
            self.attempt(Reported(job.id, rank.number, bye))
        for rank in list(job.there()):
            self.orders.pop((job.id, rank.number), None)
            self.attempt(RankGone(job.id, rank.number, pid=rank.pid))


@pytest.mark.filterwarnings("ignore:HiGHS")
@pytest.mark.parametrize("seeds", [range(FIRST, FIRST + WORLDS)], ids=str)
def test_once_all_do_as_they_are_told_every_job_ends(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        if world.draw.random() < 0.6:
            world.attempt(Limited(world.draw.choice([0, 1, 2])))
        for _ in range(STEPS):
            world.anything()
        replayed = world.driver.replayed(world.make_policy())
        assert picture(replayed) == picture(world.core), f"seed {seed}: replayed it is another core"
        left = world.cooperate()
        assert [(job.id, job.state) for job in left] == [], f"seed {seed}"
        assert world.core.ledger.free == len(world.core.devices), f"seed {seed}"
        assert not any(world.core.state.occupants), f"seed {seed}"
