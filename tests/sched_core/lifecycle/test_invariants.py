"""The promises of the core, whatever happens to it; and a journal replayed is the same core."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError, InvariantError, UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Event,
    Exited,
    Held,
    Moved,
    RankGone,
    Released,
    Reported,
    Submitted,
    Tell,
    Weighted,
    Woken,
)
from gpuslice.sched_core.lifecycle.rank_orders import NEVER
from gpuslice.sched_core.policies.registry import make_policy

from ..driver import PROGRAM, QUANTUM_S, Driver, picture, refused, suspended


def test_the_invariants_can_fail() -> None:
    driver = Driver()
    driver.running_pair()
    driver.core.state.occupants[0]["b"] = driver.core.jobs["b"]
    with pytest.raises(InvariantError, match="at once"):
        driver.core.check()


MESSAGES = st.one_of(
    st.builds(wire.Progress, epoch=st.integers(0, 4), boundary=st.integers(0, 40), step=st.integers(0, 40)),
    st.builds(suspended, st.integers(0, 4), st.integers(0, 40)),
    st.builds(wire.Resumed, epoch=st.integers(0, 4), boundary=st.integers(0, 40), stages_s=st.just({})),
    st.builds(wire.Overshot, epoch=st.integers(0, 4), boundary=st.integers(0, 40)),
    st.builds(refused, st.integers(0, 4), st.integers(0, 40), running=st.booleans(), retryable=st.booleans()),
    st.builds(
        wire.Profiled,
        epoch=st.integers(0, 4),
        tensors=st.integers(0, 4),
        nbytes=st.integers(0, 40),
        largest_bytes=st.integers(0, 80),
    ),
    st.builds(wire.Bye, epoch=st.integers(0, 4), boundary=st.integers(0, 40), step=st.integers(0, 40)),
)
JOBS = st.sampled_from("abcd")
RANKS = st.integers(0, 2)
POLICIES: dict[str, dict[str, Any]] = {
    "2das": {"thresholds": (1.0, 5.0), "promote": 2.0},
    "gittins": {"thresholds": (1.0, 5.0)},
    "las": {"quantum_s": QUANTUM_S},
    "rr": {"quantum_s": QUANTUM_S},
    "srtf": {},
}
BEHAVIOURS = st.sampled_from(["obeys", "obeys", "refuses", "overshoots"])


Order = wire.Resume | wire.Suspend


class CoreMachine(RuleBasedStateMachine):
    """Sensible ranks mixed with arbitrary events; a sensible rank does what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(2)
        self.policy = "rr"
        self.epochs: dict[str, int] = {}
        #: The orders of each rank that it has not carried out, oldest first.
        self.orders: dict[tuple[str, int], list[Order]] = {}

    def attempt(self, event: Event) -> None:
        before = picture(self.driver.core)
        try:
            commands = self.driver.do(event)
        except (IllegalTransitionError, UsageError):
            assert picture(self.driver.core) == before
            return
        for command in commands:
            if isinstance(command, Tell) and isinstance(command.message, Order):
                self.orders.setdefault((command.job, command.rank), []).append(command.message)

    @initialize(
        ranks=st.lists(st.integers(1, 2), max_size=3),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def submit_some(self, ranks: list[int], policy: str) -> None:
        self.policy = policy
        self.driver = Driver(2, make_policy(policy, POLICIES[policy]))
        for job, count in zip("abc", ranks, strict=False):
            self.submit(job, count)
            for rank in range(count):
                self.hello(job, rank)

    @rule(job=JOBS, ranks=st.integers(1, 3))
    def submit(self, job: str, ranks: int) -> None:
        self.attempt(
            Submitted(
                JobSpec(
                    id=job,
                    submit_s=self.driver.now_s,
                    devices=ranks,
                    max_restarts=ranks % 2,
                    boundary_timeout_s=2.0,
                    on_boundary_timeout="kill" if job == "c" else "leave",
                    trial_batches=5 if job in "bd" else 0,
                ),
                PROGRAM,
            )
        )

    @rule(job=JOBS, rank=RANKS)
    def hello(self, job: str, rank: int) -> None:
        gang = self.driver.core.jobs.get(job)
        world = len(gang.ranks) if gang else 1
        self.attempt(Reported(job, rank, wire.Hello(version=1, job=job, rank=rank, world_size=world, pid=1)))

    @precondition(lambda self: any(self.orders.values()))
    @rule(
        data=st.data(),
        boundary=st.integers(0, 40),
        behaves=BEHAVIOURS,
    )
    def carry_out(self, data: st.DataObject, boundary: int, behaves: str) -> None:
        job, number = data.draw(st.sampled_from(sorted(key for key, orders in self.orders.items() if orders)))
        self._answer(job, number, boundary, behaves)

    def _answer(self, job: str, number: int, boundary: int, behaves: str) -> None:
        order = self.orders[job, number].pop(0)
        if isinstance(order, wire.Suspend) and order.stop_at == NEVER:
            return  # the suspend was called off: the rank trains on
        answer: wire.FromAgent
        if behaves == "refuses":
            answer = refused(order.epoch, boundary, running=isinstance(order, wire.Suspend))
        elif isinstance(order, wire.Resume):
            answer = wire.Resumed(epoch=order.epoch, boundary=boundary, stages_s={})
        elif behaves == "overshoots":
            answer = wire.Overshot(epoch=order.epoch, boundary=order.stop_at + boundary)
        else:
            answer = suspended(order.epoch, order.stop_at)
        self.attempt(Reported(job, number, answer))

    @rule(job=JOBS, rank=RANKS, message=MESSAGES)
    def say_anything(self, job: str, rank: int, message: wire.FromAgent) -> None:
        self.attempt(Reported(job, rank, message))

    @rule(job=JOBS, rank=RANKS)
    def lose_rank(self, job: str, rank: int) -> None:
        self.attempt(RankGone(job, rank))

    @rule(job=JOBS, code=st.integers(-9, 3))
    def exit(self, job: str, code: int) -> None:
        self.attempt(Exited(job, code, "MemoryError" if code == 3 else ""))

    @rule(job=JOBS)
    def cancel(self, job: str) -> None:
        self.attempt(Cancelled(job, "enough"))

    @rule(job=JOBS)
    def hold(self, job: str) -> None:
        self.attempt(Held(job))

    @rule(job=JOBS)
    def release(self, job: str) -> None:
        self.attempt(Released(job))

    @rule(job=JOBS, devices=st.lists(st.sampled_from(["null:0", "null:1", "null:7"]), max_size=2))
    def move(self, job: str, devices: list[str]) -> None:
        self.attempt(Moved(job, tuple(devices)))

    @rule(job=JOBS, weight=st.sampled_from([-1.0, 0.5, 1.0, 3.0]))
    def weigh(self, job: str, weight: float) -> None:
        self.attempt(Weighted(job, weight))

    @rule(after_s=st.floats(0.0, 3.0))
    def wake(self, after_s: float) -> None:
        self.driver.now_s += after_s
        self.attempt(Woken())

    @invariant()
    def promises_hold(self) -> None:
        core = self.driver.core
        core.check()
        for job in core.jobs.values():
            assert job.epoch >= self.epochs.get(job.id, 0)
            self.epochs[job.id] = job.epoch
            if job.state is JobState.RUNNING:
                assert {rank.phase for rank in job.training()} <= {RankPhase.ON}

    def teardown(self) -> None:
        replayed = self.driver.replayed(make_policy(self.policy, POLICIES[self.policy]))
        assert picture(replayed) == picture(self.driver.core)


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
