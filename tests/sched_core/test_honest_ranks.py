"""Ranks that follow their orders, as slowly as they like: two are never on one device, and all get on.

The core and the ranks' own `Orders`, with everything between them in hand: each message is delivered when
chance wants, in order, or lost with a scheduler that died. What the ranks really do with devices is written
down here.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gpuslice import wire
from gpuslice.agent.orders import Orders, Phase
from gpuslice.errors import IllegalTransitionError
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Command,
    Event,
    Exited,
    Held,
    Kill,
    Moved,
    RankGone,
    Released,
    Reported,
    Submitted,
    Tell,
)
from gpuslice.sched_core.policies.registry import make_policy

from .driver import PROGRAM, QUANTUM_S, Driver, picture, refused, suspended

LATE_S = 2.0
POLICIES = {"rr": {"quantum_s": QUANTUM_S}, "las": {"quantum_s": QUANTUM_S}, "2das": {"thresholds": (1.0,)}}
#: ``GPUSLICE_ENDS`` is the first seed; ``./x soak ends`` lives through others, and more of them.
FIRST = int(os.environ.get("GPUSLICE_ENDS", "0"))
SEEDS, STEPS = 60 if "GPUSLICE_ENDS" in os.environ else 30, 150


class Rank:
    """One job's only process: what it was told, what it has said, and where it really is."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.boundaries = BoundaryCounter()
        self.orders = Orders(self.boundaries)
        self.inbox: list[wire.ToAgent] = []
        self.outbox: list[wire.FromAgent] = []
        self.standing: wire.Suspended | None = None
        self.device: str | None = None
        self.alive = True
        self.greet()

    def greet(self) -> None:
        """All that was on its way is lost; say how things stand."""
        self.inbox.clear()
        hello = wire.Hello(
            version=wire.PROTOCOL_VERSION,
            job=self.job,
            rank=0,
            world_size=1,
            pid=1,
            boundary=self.boundaries.count,
            epoch=self.orders.epoch,
            parked=self.orders.phase is not Phase.RUNNING,
        )
        self.outbox = [hello] if self.standing is None else [hello, self.standing]

    def obey(self) -> None:
        """Take in the oldest order."""
        match self.inbox.pop(0):
            case wire.Resume() as order:
                self.outbox += self.orders.resume(order)
            case wire.Suspend() as order:
                self.outbox += self.orders.suspend(order)

    def go_on(self, *, well: bool) -> None:
        """What the main thread does while it is parked; ``well``: there is room on the device."""
        if self.orders.called:
            order = self.orders.await_order()
            assert isinstance(order, wire.Resume)
            if well or self.standing is None:
                self._enter(order.device)
            else:
                self.outbox.append(refused(self.orders.epoch, self.boundaries.count, running=False))

    def _enter(self, device: str) -> None:
        self.device, self.standing = device, None
        self.orders.run_on()
        count = self.boundaries.count
        self.outbox.append(wire.Resumed(epoch=self.orders.epoch, boundary=count, stages_s={}))

    def park(self) -> None:
        """Be off the device, published."""
        self.device = None
        self.standing = suspended(self.orders.epoch, self.boundaries.count)
        self.outbox.append(self.standing)


class World:
    """One device or two, and up to four jobs, which have all trained and been suspended before it begins."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.policy = self.random.choice(sorted(POLICIES))
        devices = self.random.choice([1, 1, 2])
        self.driver = Driver(devices, make_policy(self.policy, POLICIES[self.policy]))
        self.ranks: dict[str, Rank] = {}
        self.ends: list[Event] = []
        self.doomed: set[str] = set()
        for job in "abcd"[: self.random.choice([2, 3, 4])]:
            self.ranks[job] = Rank(job)
            spec = JobSpec(
                id=job,
                submit_s=self.driver.now_s,
                boundary_timeout_s=LATE_S,
                on_boundary_timeout="kill" if job == "c" else "leave",
                trial_batches=3 if job == "d" else 0,
            )
            self.tell_core(Submitted(spec, PROGRAM))
        for _ in range(2 * len(self.ranks)):
            self.flow()
            self.wake(QUANTUM_S)

    def live(self, steps: int) -> None:
        """So many things happen, each the likelier the more often it is named here."""
        acts = [
            *[self.somebody_works] * 12,
            *[self.somebody_obeys] * 8,
            *[self.somebody_is_heard] * 8,
            *[self.most_flows] * 2,
            *[self.time_passes] * 6,
            *[self.owners_ask] * 3,
            self.the_scheduler_dies_and_comes_back,
            self.somebody_is_killed,
            *[self.ends_are_seen] * 2,
        ]
        for _ in range(steps):
            self.random.choice(acts)()
            self.check()

    def check(self) -> None:
        """Two are never on one device."""
        places = [rank.device for rank in self.ranks.values() if rank.device is not None]
        assert len(places) == len(set(places)), {job: rank.device for job, rank in self.ranks.items()}

    # What may happen.

    def somebody_works(self) -> None:
        self.work(self.anybody(), self.random.choice(["leaves"] * 8 + ["refuses", "dies"]))

    def somebody_obeys(self) -> None:
        self.deliver_orders(self.anybody(), self.random.randint(1, 3))

    def somebody_is_heard(self) -> None:
        self.deliver_reports(self.anybody(), self.random.randint(1, 3))

    def most_flows(self) -> None:
        """A slice or two in which somebody is not heard, is deaf, or is stopped."""
        deaf, still, mute = (self.random.choice(["", "", self.anybody()]) for _ in range(3))
        for _ in range(self.random.randint(1, 2)):
            self.wake(QUANTUM_S)
            self.flow(deaf=deaf, still=still, mute=mute)
            self.check()

    def time_passes(self) -> None:
        self.wake(self.random.choice([0.1, QUANTUM_S, QUANTUM_S, 2 * LATE_S]))

    def owners_ask(self) -> None:
        job = self.anybody()
        device = str(self.random.choice(self.driver.core.devices))
        events: list[Event] = [Held(job), Released(job), Moved(job, (device,))]
        if self.random.random() < 0.1:
            events = [Cancelled(job, "enough")]
        with suppress(IllegalTransitionError):  # it is held already, or has ended
            self.tell_core(self.random.choice(events))

    def the_scheduler_dies_and_comes_back(self) -> None:
        self.doomed |= {name for name, job in self.driver.core.jobs.items() if job.state.ended}
        for rank in self.ranks.values():
            if rank.alive:
                rank.greet()
            else:
                rank.outbox.clear()

    def somebody_is_killed(self) -> None:
        if self.random.random() < 0.3 and (rank := self.living(self.anybody())) is not None:
            self.die(rank)
            if self.random.random() < 0.5:
                rank.outbox = rank.outbox[:1]

    def ends_are_seen(self) -> None:
        """After what the process said last; one that is to be ended has ended by now."""
        for job in sorted(self.doomed):
            if (rank := self.living(job)) is not None:
                self.die(rank)
        self.doomed.clear()
        ends, self.ends = self.ends, []
        for event in ends:
            assert isinstance(event, RankGone | Exited)
            self.deliver_reports(event.job, 99)
            if isinstance(event, Exited) or self.driver.core.jobs[event.job].ranks[0].pid:
                self.tell_core(event)

    # What that is made of.

    def anybody(self) -> str:
        return self.random.choice(sorted(self.ranks))

    def living(self, job: str) -> Rank | None:
        rank = self.ranks[job]
        return rank if rank.alive else None

    def tell_core(self, event: Event) -> None:
        """An honest rank, or the shell, is never told that something is impossible."""
        self.carry_out(self.driver.do(event))

    def wake(self, after_s: float) -> None:
        self.carry_out(self.driver.wake(after_s))

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Tell) and self.ranks[command.job].alive:
                self.ranks[command.job].inbox.append(command.message)
            elif isinstance(command, Kill):
                self.doomed.add(command.job)

    def flow(self, *, deaf: str = "", still: str = "", mute: str = "") -> None:
        """All that was said arrives, and everybody does it, but for one each."""
        for _ in range(3):
            for job in self.ranks:
                if job != deaf:
                    self.deliver_orders(job, 9)
                for _ in range(3 if job != still else 0):
                    self.work(job, "leaves")
                if job != mute:
                    self.deliver_reports(job, 9)

    def deliver_reports(self, job: str, most: int) -> None:
        outbox = self.ranks[job].outbox
        for _ in range(min(most, len(outbox))):
            self.tell_core(Reported(job, 0, outbox.pop(0)))

    def deliver_orders(self, job: str, most: int) -> None:
        if (rank := self.living(job)) is not None:
            for _ in range(min(most, len(rank.inbox))):
                rank.obey()

    def work(self, job: str, outcome: str) -> None:
        if (rank := self.living(job)) is None:
            return
        if rank.orders.phase is not Phase.RUNNING:
            rank.go_on(well=outcome == "leaves")
            return
        rank.boundaries.count += 1
        if rank.boundaries.count >= rank.boundaries.stop_at and rank.orders.arrive(rank.boundaries.count):
            self.leave(rank, outcome)
        else:
            at = rank.boundaries.count
            rank.outbox.append(wire.Progress(epoch=rank.orders.epoch, boundary=at, step=at))

    def leave(self, rank: Rank, outcome: str) -> None:
        """A suspend."""
        if outcome == "refuses":
            rank.orders.run_on()
            rank.outbox.append(refused(rank.orders.epoch, rank.boundaries.count, running=True))
        elif outcome == "dies":
            self.die(rank)
        else:
            rank.park()

    def die(self, rank: Rank) -> None:
        rank.alive, rank.device = False, None
        self.ends += [RankGone(rank.job, 0), Exited(rank.job, -9)]


@pytest.fixture(autouse=True)
def no_handler() -> Iterator[None]:
    """Have these ranks be of scripts that do not handle SIGTERM: a parked one that is told to end ends."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, 10))
def test_two_are_never_on_one_device_and_all_get_on(first: int) -> None:
    for seed in range(first, first + 10):
        world = World(seed)
        world.live(STEPS)
        core = world.driver.core
        for name, job in core.jobs.items():
            if job.held and not job.state.ended:
                world.tell_core(Released(name))
        passed = {job: rank.boundaries.count for job, rank in world.ranks.items()}
        for _ in range(40):
            world.flow()
            world.ends_are_seen()
            world.check()
            world.wake(QUANTUM_S)
        for job, rank in world.ranks.items():
            if world.policy == "rr" and not core.jobs[job].state.ended:  # the others promise no turn
                assert rank.boundaries.count > passed[job], (seed, job, list(core.jobs[job].history))
        replayed = world.driver.replayed(make_policy(world.policy, POLICIES[world.policy]))
        assert picture(replayed) == picture(core), seed
