"""All jobs are kept while no scheduler runs: parked, then without processes, then scheduled again."""

from __future__ import annotations

import random

import pytest

from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.command import Purpose
from gpuslice.sched_core.jobs.facts import Keep
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Command,
    Exited,
    Held,
    Kept,
    Kill,
    Launch,
    Limited,
    RankGone,
    Released,
    Submitted,
)
from gpuslice.sched_core.live.blockers import Blockers
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.wire import Hello, Resume, Suspend

from ..driver import PROGRAM, QUANTUM_S, Driver, notices, picture, told


def of(commands: list[Command], kind: type[Command]) -> list[str]:
    return [one.job for one in commands if isinstance(one, kind)]  # type: ignore[attr-defined]


def end_processes(driver: Driver, job: str) -> list[Command]:
    gang = driver.core.jobs[job]
    attempt = gang.attempt
    found = []
    for rank in gang.there():
        found += driver.do(RankGone(job, rank.number, attempt=attempt))
    return found + driver.do(Exited(job, -9, attempt=attempt))


def greet(driver: Driver, job: str) -> None:
    attempt = driver.core.jobs[job].attempt
    driver.say(job, Hello(version=1, job=job, rank=0, world_size=1, pid=7, attempt=attempt))


def kept_pair(**limits: int) -> Driver:
    """Return a driver of jobs a (trained, boundary 11) and b (never on a device), both without processes."""
    driver = Driver(**limits)
    driver.running_pair()
    stops = driver.do(Kept(Keep.PARK))
    ((_, _, stop),) = told(stops, Suspend)
    driver.parked("a", stop.stop_at)
    driver.do(Kept(Keep.END))
    for job in "ab":
        end_processes(driver, job)
    return driver


def test_jobs_park_and_nobody_follows() -> None:
    driver = Driver()
    driver.running_pair()
    ((name, _, _),) = told(driver.do(Kept(Keep.PARK)), Suspend)
    assert name == "a"
    assert not told(driver.parked("a", 20), Resume), "the device is nobody's"
    assert not told(driver.wake(), Resume)
    assert driver.state("a") is JobState.SUSPENDED
    assert not any(job.lease or job.running for job in driver.core.jobs.values())


def test_jobs_that_are_kept_no_longer_go_on_in_the_processes_they_have() -> None:
    driver = Driver()
    driver.running_pair()
    driver.do(Kept(Keep.PARK))
    driver.parked("a", 20)
    commands = driver.do(Kept(None))
    assert len(told(commands, Resume)) == 1
    assert not of(commands, Kill)
    assert not of(commands, Launch)


def test_processes_end_only_once_they_are_told_to_and_none_is_started() -> None:
    driver = Driver()
    driver.running_pair()
    driver.do(Kept(Keep.PARK))
    driver.parked("a", 20)
    commands = driver.do(Kept(Keep.END))
    assert of(commands, Kill) == ["a", "b"]
    assert all(one.purpose is Purpose.RELOCATE for one in commands if isinstance(one, Kill))
    for job in "ab":
        ends = end_processes(driver, job)
        assert not of(ends, Launch)
        assert [one.what for one in notices(ends)] == ["kept"]
    assert not of(driver.wake(), Launch)
    assert all(job.processes_gone for job in driver.core.jobs.values())


def test_the_next_scheduler_starts_them_and_no_restart_is_spent() -> None:
    driver = kept_pair()
    assert Blockers(driver.core, driver.now_s).why(driver.core.jobs["a"]) == "kept for the next `gpuslice up`"
    again = driver.replayed(RoundRobin(quantum_s=QUANTUM_S))
    assert picture(again) == picture(driver.core)
    commands = driver.do(Kept(None))
    assert sorted(of(commands, Launch)) == ["a", "b"]
    assert {job.failures for job in driver.core.jobs.values()} == {0}
    assert {job.attempt for job in driver.core.jobs.values()} == {1}
    for job in "ab":
        greet(driver, job)
    (first, *_) = [job for job in driver.core.jobs.values() if job.lease]
    driver.resumed(first.id)
    arrived = [one for one in notices(driver.progress(first.id, 30)) if one.what == "arrived"]
    assert not arrived, "the time without a scheduler is no blackout of a move"


def test_steps_are_told_while_it_is_kept() -> None:
    assert kept_pair().core.jobs["a"].steps_so_far == 11


def test_who_is_held_stays_held() -> None:
    driver = Driver()
    driver.running_pair()
    driver.do(Held("b"))
    driver.do(Kept(Keep.PARK))
    driver.parked("a", 20)
    driver.do(Kept(Keep.END))
    for job in "ab":
        end_processes(driver, job)
    assert of(driver.do(Kept(None)), Launch) == ["a"]
    assert of(driver.do(Released("b")), Launch) == ["b"]


def test_who_waits_for_another_attempt_gets_it_afterwards() -> None:
    driver = Driver()
    driver.do(Submitted(JobSpec(id="a", submit_s=0.0, devices=1, max_restarts=1), PROGRAM))
    greet(driver, "a")
    driver.resumed("a")
    driver.progress("a", 3)
    driver.do(Kept(Keep.PARK))
    end_processes(driver, "a")
    assert not of(driver.wake(60.0), Launch)
    driver.do(Kept(Keep.END))
    assert of(driver.do(Kept(None)), Launch) == ["a"]
    assert driver.core.jobs["a"].failures == 1


def test_with_a_limit_on_processes_as_many_are_started_again() -> None:
    driver = Driver()
    driver.do(Limited(1))
    for job in "abc":
        driver.submit(job)
    started = [name for name, job in driver.core.jobs.items() if job.command.launched]
    driver.do(Kept(Keep.END))
    for job in started:
        end_processes(driver, job)
    assert len(of(driver.do(Kept(None)), Launch)) == len(started)


@pytest.mark.parametrize("seed", range(10))
def test_whenever_jobs_are_kept_all_of_them_train_again(seed: int) -> None:
    driver, draw = kept_at_random(seed)
    driver.do(Kept(None))
    all_train(driver, draw)


def kept_at_random(seed: int) -> tuple[Driver, random.Random]:
    """Return a driver of three kept jobs without processes. Orders, reports and ends came in any order."""
    draw = random.Random(seed)
    driver = Driver(2)
    for job in "abc":
        driver.submit(job)
    for _ in range(40):
        _act(driver, draw)
    driver.do(Kept(Keep.PARK))
    for _ in range(draw.randrange(30)):
        _act(driver, draw)
    while any(job.lease for job in driver.core.jobs.values()):
        _act(driver, draw)
    driver.do(Kept(Keep.END))
    for job in driver.core.jobs.values():
        if not job.processes_gone:
            end_processes(driver, job.id)
    assert all(job.processes_gone for job in driver.core.jobs.values())
    return driver, draw


def all_train(driver: Driver, draw: random.Random) -> None:
    """Check that each of the three jobs trains in the end, and none fails."""
    trained: set[str] = set()
    for _ in range(400):
        _act(driver, draw)
        trained |= {name for name, job in driver.core.jobs.items() if job.processes.trains}
    assert trained == set("abc")
    assert not any(job.failures or job.state.ended for job in driver.core.jobs.values())


def _act(driver: Driver, draw: random.Random) -> None:
    """Let a job drawn at random do the next thing that it was told, or let time pass."""
    name = draw.choice("abc")
    job = driver.core.jobs[name]
    (rank,) = job.ranks
    if draw.random() < 0.2 or not job.command.runs:
        driver.wake(0.3)
    elif rank.phase.value == "absent":
        greet(driver, name)
    elif rank.phase.value == "coming":
        driver.resumed(name)
    elif rank.phase.value == "on" and job.state is JobState.SUSPENDING:
        driver.parked(name, max(job.asked.stop_at, rank.boundary))
    elif rank.phase.value == "on":
        driver.progress(name, rank.boundary + 1)
