"""A job whose command is told how many ranks to start: it is started anew for another number of devices."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Command,
    Exited,
    Held,
    Kill,
    Launch,
    RankGone,
    Released,
)
from gpuslice.sched_core.policy import Migrate, Plan, Start

from .driver import Resized, Resizer, devices, notices, picture, told

JOB = "e"


class Relaunched(Resized):
    """A driver with such a job, at boundary 10."""

    def __init__(self, max_restarts: int = 0) -> None:
        super().__init__(
            JobSpec(
                id=JOB,
                submit_s=0.25,
                least_devices=1,
                most_devices=3,
                relaunch=True,
                max_restarts=max_restarts,
            )
        )
        self.launched = launches(self.submitted)
        self.begin()

    def begin(self) -> list[Command]:
        """Its ranks greet, come to their devices and train."""
        commands = self.hello(JOB)
        for rank in range(len(self.job.ranks)):
            commands += self.resumed(JOB, rank)
            commands += self.progress(JOB, 10, rank)
        return commands

    def park(self) -> list[Command]:
        at = self.job.asked.stop_at
        return [c for rank in range(len(self.job.ranks)) for c in self.parked(JOB, at, rank)]

    def end(self, code: int = 1) -> list[Command]:
        """All of its processes end."""
        commands = [c for rank in self.job.there() for c in self.do(RankGone(JOB, rank.number))]
        return commands + self.do(Exited(JOB, code))


def launches(commands: list[Command]) -> int:
    return sum(isinstance(command, Launch) for command in commands)


def kills(commands: list[Command]) -> list[bool]:
    return [not command.at_once for command in commands if isinstance(command, Kill)]


def test_it_ends_at_one_boundary_and_begins_with_as_many_ranks_as_devices() -> None:
    driver = Relaunched()
    assert (driver.launched, len(driver.job.ranks)) == (1, 1)
    driver.want(0, 1, 2)
    commands = driver.park()
    assert kills(commands) == [True]
    assert [n.details for n in notices(commands) if n.what == "relaunched"] == [{"from": 1, "to": 3}]
    assert (driver.state(JOB), driver.job.lease) == (JobState.RELAUNCHING, (0,)), "it may be saving"
    commands = driver.end()
    assert launches(commands) == 1
    assert (driver.state(JOB), driver.job.lease, len(driver.job.ranks)) == (JobState.QUEUED, (), 3)
    orders = told(driver.begin(), wire.Resume)
    assert [(rank, order.device, order.width) for _, rank, order in orders] == [
        (0, "null:0", 0),
        (1, "null:1", 0),
        (2, "null:2", 0),
    ]
    assert driver.state(JOB) is JobState.RUNNING
    driver.want(3)
    driver.park()
    driver.end()
    driver.begin()
    assert (driver.state(JOB), driver.job.lease) == (JobState.RUNNING, (3,))
    assert (driver.job.attempt, driver.job.failures) == (2, 0)


def test_how_long_it_stood_still_is_told_when_it_trains_again() -> None:
    driver = Relaunched()
    driver.want(0, 1)
    driver.park()
    driver.now_s += 2.0
    driver.end()
    driver.now_s += 3.0
    driver.hello(JOB)
    driver.now_s += 4.0
    for rank in (0, 1):
        driver.resumed(JOB, rank)
    told_of = [note.details for note in notices(driver.progress(JOB, 10)) if note.what == "arrived"]
    assert told_of == [{"blackout_s": 9.0, "ending_s": 2.0, "bringing_s": 3.0, "setup_s": 4.0}]
    assert driver.job_history.accounts[JOB].blackout_s >= 9.0


def test_a_move_of_the_same_number_is_a_suspend_like_any_other() -> None:
    driver = Relaunched()
    driver.want(2)
    assert kills(driver.park()) == []
    driver.resumed(JOB)
    assert driver.job.lease == (2,)


def test_parked_it_ends_when_it_is_wanted_on_more_devices() -> None:
    driver = Relaunched()
    driver.want()
    driver.policy.next = lambda view: Plan()
    driver.park()
    assert driver.state(JOB) is JobState.SUSPENDED
    driver.policy.next = lambda view: Plan([Start(JOB, (1, 2))])
    driver.core.state.plan_due = True
    assert kills(driver.wake()) == [True]
    assert (driver.state(JOB), driver.job.lease) == (JobState.RELAUNCHING, ())
    driver.end()
    driver.begin()
    assert (driver.state(JOB), driver.job.lease) == (JobState.RUNNING, (1, 2))


def test_what_the_policy_wants_meanwhile_is_what_it_gets() -> None:
    """Another number while it ends; another one yet while it is being started; and none at all."""
    driver = Relaunched()
    driver.want(0, 1, 2)
    driver.park()
    driver.want(0, 1)
    driver.end()
    assert len(driver.job.ranks) == 2
    commands = driver.want(1, 2, 3)
    assert kills(commands) == [True], "the one that was just started is for too few"
    driver.end()
    driver.want()
    commands = driver.hello(JOB)
    assert told(commands, wire.Resume) == []
    assert driver.state(JOB) is JobState.QUEUED
    driver.policy.next = lambda view: Plan([Start(JOB, (0, 1, 3))])
    driver.core.state.plan_due = True
    driver.wake()
    for rank in range(3):
        driver.resumed(JOB, rank)
    assert (driver.state(JOB), driver.job.lease) == (JobState.RUNNING, (0, 1, 3))


def test_whoever_has_its_devices_next_waits_until_its_processes_are_gone() -> None:
    driver = Relaunched()
    driver.want(1, 2)
    driver.submit("other")
    driver.policy.next = lambda view: Plan([Start("other", (0,))])
    assert told(driver.hello("other"), wire.Resume) == []
    driver.park()
    assert driver.core.jobs["other"].lease == ()
    driver.do(RankGone(JOB, 0))
    assert driver.core.jobs["other"].lease == ()
    driver.do(Exited(JOB, 1))
    assert driver.core.jobs["other"].lease == (0,)


def test_a_job_that_ends_by_itself_just_then_has_succeeded() -> None:
    driver = Relaunched()
    driver.want(0, 1)
    driver.say(JOB, wire.Bye(epoch=driver.job.epoch, boundary=11, step=11))
    driver.do(RankGone(JOB, 0))
    driver.do(Exited(JOB, 0))
    assert driver.state(JOB) is JobState.SUCCEEDED


@pytest.mark.parametrize("when", ["ending", "starting"])
def test_cancelled_or_held_in_between_it_is_not_started(when: str) -> None:
    for owner in (Cancelled(JOB, "enough"), Held(JOB)):
        driver = Relaunched()
        driver.want(0, 1)
        driver.park()
        if when == "starting":
            driver.end()
        driver.do(owner)
        commands = driver.end(-15) if when == "ending" or isinstance(owner, Cancelled) else []
        assert launches(commands) == 0
        assert driver.job.lease == ()
        if isinstance(owner, Cancelled):
            assert driver.state(JOB) is JobState.CANCELLED
        elif when == "ending":
            assert driver.state(JOB) is JobState.QUEUED
            assert launches(driver.do(Released(JOB))) == 1


def test_failures_are_counted_without_the_times_that_it_was_resized() -> None:
    driver = Relaunched(max_restarts=1)
    driver.want(0, 1)
    driver.park()
    driver.end()
    driver.begin()
    driver.do(RankGone(JOB, 1))
    driver.end(-9)
    assert (driver.state(JOB), driver.job.failures) == (JobState.QUEUED, 1)
    assert len(driver.job.ranks) == 1, "it begins small again"


def test_the_journal_makes_the_same_of_it() -> None:
    driver = Relaunched()
    driver.want(0, 1, 2)
    driver.park()
    driver.end()
    driver.begin()
    again = Core(devices(4), policy := Resizer())
    for event, now in driver.journal:
        if type(event).__name__ == "Woken":
            policy.next = lambda view: Plan([Migrate(JOB, (0, 1, 2))])
            again.state.plan_due = True
        again.handle(event, now)
    assert picture(again) == picture(driver.core)
