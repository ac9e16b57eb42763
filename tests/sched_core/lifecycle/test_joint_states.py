"""Every joint state of a gang has a step or a named wait, and random targets end at rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice import wire
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Purpose, Stage
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Command, Tell
from gpuslice.sched_core.lifecycle.steps import For, Step, Waits, next_step
from gpuslice.sched_core.policy import Migrate, Plan, Start, Suspend, View

from ..driver import PROGRAM, Driver, Scripted, put_into, refused, suspended
from .test_steps import NOW_S, Surroundings

HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING, JobState.RESUMING)
#: The states in which the core can take each step.
TAKEN_IN = {
    Step.STOP: {JobState.RUNNING},
    Step.KEEP: {JobState.RUNNING},
    Step.ENTER: {JobState.QUEUED, JobState.SUSPENDED},
    Step.RELOCATE: {JobState.QUEUED, JobState.SUSPENDED},
    Step.RELAUNCH: {JobState.QUEUED, JobState.SUSPENDED},
    Step.STOP_LATER: {JobState.SUSPENDING},
    Step.COME_AGAIN: {JobState.STARTING, JobState.RESUMING},
    Step.GIVE_UP: set(HOLDING),
}
WORLDS = (Surroundings(), Surroundings(elsewhere=True), Surroundings(elsewhere=True, portable=False))


def phases() -> Iterator[tuple[RankPhase, ...]]:
    """Every set of phases that the ranks of a gang can be in together."""
    for count in range(1, len(RankPhase) + 1):
        yield from combinations(RankPhase, count)


def gangs(state: JobState, *, relaunch: bool) -> Iterator[Gang]:
    """A gang in ``state`` with its ranks in every set of phases, with every target and what it was told."""
    for joint, target, ending, idle, beside, boundary in product(
        phases(),
        ("nowhere", "here", "elsewhere"),
        (None, Purpose.RELOCATE),
        (None, 1.0),
        (False, True),
        (4, 8),
    ):
        count = len(joint)
        spec = JobSpec(id="a", submit_s=0.0, devices=count, most_devices=count + 1, relaunch=relaunch)
        job = Gang(spec if relaunch else JobSpec(id="a", submit_s=0.0, devices=count), 0, PROGRAM)
        here = tuple(range(count))
        put_into(job, state, here if state in HOLDING else ())
        job.command.go_on(Stage.STARTED)
        if ending is not None and state not in HOLDING and state is not JobState.RELAUNCHING:
            job.command.ending = ending
        others = tuple(range(10, 11 + count if relaunch else 10 + count))
        job.running, job.placement = target != "nowhere", {"here": here, "elsewhere": others}.get(target, ())
        job.processes.idle_since_s = idle
        if beside:
            job.processes.beside = (wire.Hello(version=1, job="a", rank=0, world_size=count, pid=7),)
        job.asked.stop_at = 8
        for rank, phase in zip(job.ranks, joint, strict=True):
            rank.phase, rank.boundary = phase, boundary
        yield job


@pytest.mark.parametrize("relaunch", [False, True], ids=["plain", "relaunched"])
@pytest.mark.parametrize("state", list(JobState))
def test_every_joint_state_of_a_gang_has_a_step_or_a_named_wait(state: JobState, relaunch: bool) -> None:
    for job in gangs(state, relaunch=relaunch):
        other = Gang(JobSpec(id="b", submit_s=0.0, devices=1), 1, PROGRAM)
        for world in (*WORLDS, Surroundings(blocked_by=other)):
            answer = next_step(job, world, NOW_S)
            if isinstance(answer, Step):
                assert state in TAKEN_IN[answer]
            else:
                assert isinstance(answer, Waits)
                assert answer.reason or answer.on is For.NOTHING


class Honest:
    """Two jobs on three devices, whose ranks do as they are told, each answer when a test says so."""

    def __init__(self) -> None:
        self.policy = Scripted()
        self.policy.next = lambda view: Plan([])
        self.driver = Driver(3, self.policy)
        self.orders: dict[tuple[str, int], list[wire.ToAgent]] = {}
        self.refusals = 0
        for job, ranks in (("a", 1), ("b", 2)):
            self._note(self.driver.submit(job, ranks))
            for rank in range(ranks):
                self.policy.next = lambda view: Plan([])
                hello = wire.Hello(version=1, job=job, rank=rank, world_size=ranks, pid=1)
                self._note(self.driver.say(job, hello, rank))

    def _note(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Tell):
                self.orders.setdefault((command.job, command.rank), []).append(command.message)

    def want(self, targets: dict[str, tuple[int, ...]]) -> None:
        """Have the policy want the jobs there; empty: nowhere."""

        def plan(view: View) -> Plan:
            jobs = {job.id: job for job in view.jobs}
            leave = [Suspend(name) for name, on in targets.items() if not on and jobs[name].running]
            move = [Migrate(name, on) for name, on in targets.items() if on and jobs[name].running]
            start = [Start(name, on) for name, on in targets.items() if on and not jobs[name].running]
            return Plan([*leave, *move, *start])

        self.policy.next = plan
        self.driver.core.state.plan_due = True
        self._note(self.driver.wake())

    def answer(self, number: int, refuse: bool) -> None:
        """Let a rank that has an order carry it out, or refuse it."""
        waiting = sorted(key for key, orders in self.orders.items() if orders)
        (job, rank) = waiting[number % len(waiting)]
        order, core = self.orders[job, rank].pop(0), self.driver.core
        one, epoch = core.jobs[job].ranks[rank], core.jobs[job].epoch
        self.policy.next = lambda view: Plan([])
        said: wire.FromAgent | None = None
        match order:
            case wire.Resume() if order.epoch == epoch and one.phase is RankPhase.COMING:
                said = wire.Resumed(epoch=epoch, boundary=one.boundary, stages_s={})
                if refuse:
                    said = refused(epoch, one.boundary, running=False)
            case wire.Suspend() if order.epoch == epoch and one.phase is RankPhase.ON:
                said = self._stop(order, one.boundary, refuse)
        if said is not None:
            self._note(self.driver.say(job, said, rank))

    def _stop(self, order: wire.Suspend, boundary: int, refuse: bool) -> wire.FromAgent | None:
        if order.stop_at >= 2**62:
            return None
        if refuse:
            return refused(order.epoch, boundary, running=True)
        return suspended(order.epoch, max(order.stop_at, boundary))

    def at_rest(self) -> bool:
        """Return True if no order is unanswered and each job is where it is to be."""
        jobs = self.driver.core.jobs.values()
        return not any(self.orders.values()) and all(job.lease == job.wanted for job in jobs)


_PLACES = {"a": [(), (0,), (1,), (2,)], "b": [(), (0, 1), (1, 0), (1, 2), (2, 0)]}


@given(
    st.lists(st.tuples(*(st.sampled_from(places) for places in _PLACES.values())), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([False, False, False, True])), max_size=20),
)
def test_random_targets_end_at_rest_in_bounded_steps(
    targets: list[tuple[tuple[int, ...], ...]], answers: list[tuple[int, bool]]
) -> None:
    world, script = Honest(), iter(answers)
    for on_a, on_b in targets:
        if not set(on_a) & set(on_b):
            world.want({"a": on_a, "b": on_b})
        for number, refuse in [step for _, step in zip(range(3), script, strict=False)]:
            if any(world.orders.values()):
                world.answer(number, refuse and world.refusals < 3)
                world.refusals += refuse
    # A job is stopped and resumed at most twice more; each order has one answer, each refusal a pause.
    for _ in range(40):
        if world.at_rest():
            break
        if any(world.orders.values()):
            world.answer(0, refuse=False)
        else:
            world.policy.next = lambda view: Plan([])
            world._note(world.driver.wake(1.0))
    assert world.at_rest(), {name: job.history for name, job in world.driver.core.jobs.items()}
