"""The core orders what it has ordered before, to the byte, whatever happens under whichever policy.

``command_record`` says how: the commands of each test here are in its record.
"""

from __future__ import annotations

from collections import deque

import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError, UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Event,
    Exited,
    Launch,
    Limited,
    RankGone,
    Reported,
    Submitted,
    Tell,
    Woken,
)
from gpuslice.sched_core.policies.registry import make_policy

from .command_record import recorded
from .driver import PROGRAM, devices
from .test_everybody_ends import STEPS, World

EVENTS = 4_000
POLICIES = ("erratic", "rr", "2das", "gittins", "gandiva", "optimus", "themis", "tetris")


class Unchecked(World):
    """A world that only hands events on: other tests check what holds between them."""

    def attempt(self, event: Event) -> None:
        try:
            commands = self.core.handle(event, self.driver.now_s)
        except (IllegalTransitionError, UsageError):
            return
        self.note(commands)


@pytest.mark.filterwarnings("ignore:HiGHS")
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_happens(policy: str) -> None:
    with recorded() as record:
        seed = 0
        while record.events < EVENTS:
            world = Unchecked(seed, policy)
            if world.draw.random() < 0.6:
                world.attempt(Limited(world.draw.choice([0, 1, 2])))
            for _ in range(STEPS):
                world.anything()
            seed += 1
    assert seed > 1


class Queue:
    """Many jobs of one and two ranks that do as they are told. On a device they pass a boundary a second."""

    def __init__(self, policy: str, count: int, device_count: int) -> None:
        self.core = Core(devices(device_count), make_policy(policy, {}))
        self.now_s = 0.0
        self.ranks = {f"j{number}": 1 + number % 5 // 4 for number in range(count)}
        self.boundaries = {(job, rank): 0 for job, ranks in self.ranks.items() for rank in range(ranks)}
        self.epochs: dict[tuple[str, int], int] = {}
        self.ended: set[str] = set()
        self._pending: deque[Event] = deque()

    def happens(self, event: Event) -> None:
        """Handle ``event``, and whatever the ranks answer."""
        self._pending.append(event)
        while self._pending:
            for command in self.core.handle(self._pending.popleft(), self.now_s):
                self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Launch):
            ranks = self.ranks[command.job]
            for rank in range(ranks):
                hello = wire.Hello(version=1, job=command.job, rank=rank, world_size=ranks, pid=rank + 1)
                self._pending.append(Reported(command.job, rank, hello))
        elif isinstance(command, Tell) and isinstance(command.message, wire.Resume | wire.Suspend):
            self._answer((command.job, command.rank), command.message)

    def _answer(self, key: tuple[str, int], order: wire.Resume | wire.Suspend) -> None:
        answer: wire.FromAgent
        if isinstance(order, wire.Resume):
            self.epochs[key] = order.epoch
            answer = wire.Resumed(epoch=order.epoch, boundary=self.boundaries[key], stages_s={})
        else:
            del self.epochs[key]
            self.boundaries[key] = order.stop_at
            answer = wire.Suspended(
                epoch=order.epoch, boundary=order.stop_at, step=order.stop_at, nbytes=8, stages_s={}
            )
        self._pending.append(Reported(*key, answer))

    def second(self, most: int) -> None:
        """A second passes: who is on its devices trains, and ends after ``most`` boundaries."""
        self.now_s += 1.0
        self.happens(Woken())
        for job, rank in list(self.epochs):
            epoch = self.epochs.get((job, rank))
            if epoch is not None:
                self.boundaries[job, rank] += 1
                boundary = self.boundaries[job, rank]
                progress = wire.Progress(epoch=epoch, boundary=boundary, step=boundary)
                self.happens(Reported(job, rank, progress))
        for job in [job for job, rank in self.epochs if rank == 0 and self.boundaries[job, 0] >= most]:
            self._end(job)

    def _end(self, job: str) -> None:
        for rank in range(self.ranks[job]):
            epoch, boundary = self.epochs.pop((job, rank)), self.boundaries[job, rank]
            self.happens(Reported(job, rank, wire.Bye(epoch=epoch, boundary=boundary, step=boundary)))
            self.happens(RankGone(job, rank, pid=rank + 1))
        self.happens(Exited(job, 0))
        self.ended.add(job)


@pytest.mark.parametrize(
    "policy", ["2das", *(pytest.param(name, marks=pytest.mark.repeats) for name in ("fifo", "rr", "srsf"))]
)
def test_a_long_queue(policy: str) -> None:
    queue = Queue(policy, count=400, device_count=16)
    queue.happens(Limited(4))
    for number, (job, ranks) in enumerate(queue.ranks.items()):
        queue.now_s += number % 3 / 8
        queue.happens(Submitted(JobSpec(id=job, submit_s=queue.now_s, devices=ranks), PROGRAM))
    for _ in range(1000):
        queue.second(most=9)
    assert len(queue.ended) == len(queue.ranks)
