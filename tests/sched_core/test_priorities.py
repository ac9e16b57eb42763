"""Priorities: the higher one gets devices first, under every policy, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from gpuslice.errors import UsageError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Exited, Held, Limited, RankGone, Released, Submitted
from gpuslice.sched_core.live.blockers import Blockers
from gpuslice.sched_core.policies.registry import make_policy, policy_names
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import Plan, Policy, View

from .driver import PROGRAM, QUANTUM_S, Driver, picture

POLICIES = [name for name in policy_names() if not make_policy(name, {}).needs_durations]


class Ranked(Driver):
    """A driver with jobs of priorities, whose ranks do at once as they are told."""

    def ask(self, job: str, priority: int = 0, ranks: int = 1, **fields: object) -> None:
        fields |= {"devices": ranks, "priority": priority}
        spec = JobSpec(id=job, submit_s=self.now_s, **fields)  # type: ignore[arg-type]
        self.do(Submitted(spec, PROGRAM))

    def obey(self) -> None:
        """Have all ranks do what they were told, until nothing changes."""
        for _ in range(40):
            changed = [self._obey(name) for name in list(self.core.jobs)]
            if not any(changed):
                return
        raise AssertionError("it goes round")

    def _obey(self, name: str) -> bool:
        job = self.core.jobs[name]
        state, epoch, ready = job.state, job.epoch, job.ready
        if job.command.launched and not job.ready and not state.ended:
            self.hello(name)
        elif state in (JobState.STARTING, JobState.RESUMING):
            for rank in range(len(job.ranks)):
                self.resumed(name, rank)
            for rank in range(len(job.ranks)):
                self.progress(name, job.ranks[rank].boundary + 1, rank)
        elif state is JobState.SUSPENDING:
            for rank in range(len(job.ranks)):
                self.parked(name, job.asked.stop_at, rank)
        return (job.state, job.epoch, job.ready) != (state, epoch, ready)

    def pass_time(self, seconds: float = QUANTUM_S) -> None:
        self.now_s += seconds
        for name, job in self.core.jobs.items():
            if job.state is JobState.RUNNING:
                for rank in range(len(job.ranks)):
                    self.progress(name, job.ranks[rank].boundary + 9, rank)
        self.wake(0.0)
        self.obey()

    def end(self, name: str) -> None:
        for rank in self.core.jobs[name].there():
            self.do(RankGone(name, rank.number, unseen=True))
        self.do(Exited(name, 0))
        self.obey()

    def running(self) -> list[str]:
        return [name for name, job in self.core.jobs.items() if job.state is JobState.RUNNING]

    def check_order(self) -> None:
        """Nobody waits while a job of lower priority trains. (All jobs need one device.)"""
        jobs = [job for job in self.core.jobs.values() if job.shown]
        waiting = max((job.spec.priority for job in jobs if not job.running), default=-99)
        assert all(job.spec.priority >= waiting for job in jobs if job.running), self.running()


@pytest.mark.parametrize("name", POLICIES)
def test_a_higher_priority_gets_the_device_at_the_next_boundary_and_gives_it_back(name: str) -> None:
    driver = Ranked(1, make_policy(name, {}))
    driver.ask("low")
    driver.obey()
    driver.pass_time()
    assert driver.running() == ["low"]
    driver.ask("high", 5)
    driver.ask("higher", 7)
    driver.obey()
    assert driver.running() == ["higher"]
    driver.check_order()
    driver.end("higher")
    assert driver.running() == ["high"]
    driver.pass_time(600.0)
    assert driver.running() == ["high"], "it has the device until it ends"
    driver.end("high")
    assert driver.running() == ["low"]


@pytest.mark.parametrize("name", POLICIES)
def test_whoever_fits_beside_the_others_disturbs_nobody(name: str) -> None:
    driver = Ranked(2, make_policy(name, {}))
    driver.ask("low")
    driver.obey()
    before = driver.core.jobs["low"].epoch
    driver.ask("high", 1)
    driver.obey()
    driver.pass_time()
    assert driver.running() == ["low", "high"]
    assert driver.core.jobs["low"].epoch == before, "it was not moved"


def test_jobs_of_one_priority_take_turns_on_what_is_left() -> None:
    driver = Ranked(2, RoundRobin(quantum_s=QUANTUM_S))
    for job in "abc":
        driver.ask(job)
    driver.ask("high", 1)
    driver.obey()
    had: set[str] = set()
    for _ in range(6):
        driver.pass_time()
        assert "high" in driver.running()
        had |= set(driver.running())
    assert had == {"a", "b", "c", "high"}


def test_a_gang_of_higher_priority_takes_as_many_devices_as_it_needs() -> None:
    driver = Ranked(3, RoundRobin(quantum_s=QUANTUM_S))
    for job in "abc":
        driver.ask(job)
    driver.obey()
    driver.ask("gang", 1, ranks=2)
    driver.obey()
    assert driver.core.jobs["gang"].state is JobState.RUNNING
    assert len(driver.running()) == 2
    driver.end("gang")
    assert driver.running() == ["a", "b", "c"]


def test_a_gang_that_does_not_fit_beside_a_higher_job_keeps_nobody_from_what_is_left() -> None:
    driver = Ranked(2, RoundRobin(quantum_s=QUANTUM_S))
    driver.ask("high", 2)
    driver.ask("gang", 1, ranks=2)
    driver.ask("low")
    driver.obey()
    assert driver.running() == ["high", "low"]
    driver.end("high")
    assert driver.running() == ["gang"]
    driver.end("gang")
    assert driver.running() == ["low"]


def test_who_is_started_ahead_follows_priorities_too() -> None:
    driver = Ranked(1, RoundRobin(quantum_s=QUANTUM_S))
    driver.do(Limited(1))
    driver.ask("first")
    driver.obey()
    for job in ("a", "b", "c"):
        driver.ask(job, -1)
    driver.ask("high", 3)
    assert driver.core.jobs["high"].command.launched
    driver.obey()
    driver.pass_time()
    assert driver.running() == ["high"]
    assert not driver.core.jobs["c"].command.launched


def test_why_says_that_others_have_a_higher_priority() -> None:
    driver = Ranked(1, RoundRobin(quantum_s=QUANTUM_S))
    driver.ask("high", 1)
    driver.ask("low")
    driver.obey()
    said = Blockers(driver.core, driver.now_s).why(driver.core.jobs["low"])
    assert said is not None
    assert said.startswith("waits for 1 device; null:0 is used by high; 1 job has a higher priority")


class Uncopied:
    """A policy that cannot be copied."""

    name, needs_durations = "uncopied", False

    def __deepcopy__(self, memo: object) -> Policy:
        raise TypeError("no")

    def plan(self, view: View) -> Plan:
        return Plan()


def test_a_policy_that_cannot_be_copied_takes_no_priorities() -> None:
    driver = Ranked(1, Uncopied())
    driver.ask("a")
    with pytest.raises(UsageError, match="policy uncopied cannot plan by priority"):
        driver.ask("b", 1)


@pytest.mark.parametrize("name", ["rr", "las", "2das", "fifo", "drf", "tetris", "gandiva"])
@pytest.mark.parametrize("seed", [1, 2])
def test_in_random_runs_nobody_is_overtaken_from_below_and_all_end(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    driver = Ranked(draw.choice([1, 2, 3]), make_policy(name, {}))
    if draw.random() < 0.5:
        driver.do(Limited(draw.choice([0, 1, 2])))
    for number in range(60):
        live = [job for job in driver.core.jobs.values() if not job.state.ended]
        deed = draw.choice(["submit", "submit", "hold", "release", "end", "time", "time"])
        if deed == "submit" and number < 40:
            driver.ask(f"j{number}", draw.choice([-1, 0, 0, 1, 2]))
        elif deed == "hold" and (free := [job for job in live if not job.held]):
            driver.do(Held(draw.choice(free).id))
        elif deed == "release" and (held := [job for job in live if job.held]):
            driver.do(Released(draw.choice(held).id))
        elif deed == "end" and driver.running():
            driver.end(draw.choice(driver.running()))
        else:
            driver.pass_time(draw.choice([0.5, 1.0, 90.0]))
        driver.obey()
        if driver.core.allocation.prestart.limit is None:
            driver.check_order()
    core = driver.replayed(make_policy(name, {}))
    assert picture(core) == picture(driver.core)
    for job in list(driver.core.jobs.values()):
        if job.held and not job.state.ended:
            driver.do(Released(job.id))
    for _ in range(400):
        driver.obey()
        if driver.running():
            driver.end(driver.running()[0])
        driver.pass_time(90.0)
        if all(job.state.ended for job in driver.core.jobs.values()):
            return
    raise AssertionError([(job.id, job.state) for job in driver.core.jobs.values() if not job.state.ended])
