"""A job whose command trains more than once: its ranks are one process after another."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from gpuslice import wire
from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Command, Exited, Held, Kill, RankGone, Submitted, Tell
from gpuslice.sched_core.policies.fifo import Fifo
from gpuslice.sched_core.policies.rr import RoundRobin

from ..driver import PROGRAM, QUANTUM_S, Driver, picture

TIMEOUT_S = 5.0


class Commands(Driver):
    """Jobs whose commands start one process after another."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.pids = count(100)

    def submit(self, job: str, ranks: int = 1, **options: object) -> list[Command]:
        spec = JobSpec(id=job, submit_s=self.now_s, devices=ranks, boundary_timeout_s=TIMEOUT_S)
        return self.do(Submitted(msgspec.structs.replace(spec, **options), PROGRAM))

    def come(self, job: str, rank: int = 0, replaces: int = 0) -> tuple[int, list[Command]]:
        """Another process of ``job`` greets."""
        pid = next(self.pids)
        size = len(self.core.jobs[job].ranks)
        hello = wire.Hello(version=1, job=job, rank=rank, world_size=size, pid=pid, replaces=replaces)
        return pid, self.say(job, hello, rank)

    def train(self, job: str, boundary: int) -> None:
        self.resumed(job)
        self.progress(job, boundary)

    def end(self, job: str, pid: int, rank: int = 0) -> list[Command]:
        """A process says Bye and ends."""
        epoch = self.core.jobs[job].epoch
        step = self.core.jobs[job].ranks[rank].step
        self.say(job, wire.Bye(epoch=epoch, boundary=step, step=step), rank)
        return self.do(RankGone(job, rank, pid=pid))


def orders(commands: list[Command], kind: type) -> list[tuple[str, int]]:
    """To which jobs' which processes (0: the rank's present one) an order of that kind goes."""
    return [(one.job, one.pid) for one in commands if isinstance(one, Tell) and isinstance(one.message, kind)]


def fifo() -> Commands:
    return Commands(policy=Fifo())


def test_the_next_process_goes_on_where_the_job_has_its_device() -> None:
    driver = fifo()
    driver.submit("a")
    pid, _ = driver.come("a")
    driver.train("a", 10)
    epoch = driver.core.jobs["a"].epoch
    driver.end("a", pid)
    assert driver.state("a") is JobState.RUNNING
    assert driver.core.jobs["a"].lease

    pid, commands = driver.come("a")

    assert orders(commands, wire.Resume) == [("a", 0)]
    assert driver.core.jobs["a"].epoch > epoch  # what the first process said last is stale
    driver.train("a", 3)
    assert driver.state("a") is JobState.RUNNING
    assert driver.core.jobs["a"].steps == 13
    assert driver.job_history.accounts["a"].given == 1  # the same slice
    driver.end("a", pid)
    driver.do(Exited("a", 0))
    assert driver.state("a") is JobState.SUCCEEDED
    assert not any(driver.core.state.occupants)


def test_a_job_without_a_process_gives_its_device_to_whoever_is_to_have_it_next() -> None:
    driver = Commands(policy=RoundRobin(quantum_s=QUANTUM_S))
    for job in "ab":
        driver.submit(job)
    pid, _ = driver.come("a")
    driver.train("a", 10)
    driver.come("b")
    driver.end("a", pid)

    commands = driver.wake()

    assert orders(commands, wire.Suspend) == []  # nobody is there to be told
    assert orders(commands, wire.Resume) == [("b", 0)]
    assert driver.state("a") is JobState.SUSPENDED
    driver.train("b", 5)
    driver.come("a")
    commands = driver.wake()
    assert orders(commands, wire.Suspend) == [("b", 0)]
    assert orders(driver.parked("b", 6), wire.Resume) == [("a", 0)]


def test_a_job_keeps_its_device_without_a_process_only_for_the_boundary_timeout() -> None:
    driver = fifo()
    for job in "ab":
        driver.submit(job)
    pid, _ = driver.come("a")
    driver.train("a", 10)
    driver.come("b")
    driver.end("a", pid)
    driver.wake(TIMEOUT_S / 2)
    assert driver.core.jobs["a"].lease

    commands = driver.wake(TIMEOUT_S)

    assert orders(commands, wire.Resume) == [("b", 0)]
    assert not driver.core.jobs["a"].lease
    pid_b = driver.core.jobs["b"].ranks[0].pid
    driver.train("b", 5)
    driver.come("a")
    assert driver.state("a") is JobState.SUSPENDED  # it waits its turn
    driver.end("b", pid_b)
    commands = driver.do(Exited("b", 0))
    assert orders(commands, wire.Resume) == [("a", 0)]


def test_a_process_that_ends_before_its_first_lease_leaves_its_place_to_the_next() -> None:
    driver = fifo()
    for job in "ab":
        driver.submit(job)
    driver.come("b")
    driver.train("b", 1)
    first, _ = driver.come("a")
    driver.do(RankGone("a", 0, pid=first))
    assert not driver.core.jobs["a"].shown  # no device is kept for nobody

    driver.come("a")

    assert driver.core.jobs["a"].shown
    driver.end("b", driver.core.jobs["b"].ranks[0].pid)
    assert orders(driver.do(Exited("b", 0)), wire.Resume) == [("a", 0)]


def test_a_second_process_waits_for_the_end_of_the_first() -> None:
    driver = fifo()
    driver.submit("a")
    first, _ = driver.come("a")
    second, commands = driver.come("a")

    assert orders(commands, wire.Queued) == [("a", second)]
    assert orders(commands, wire.Resume) == []
    driver.train("a", 10)
    assert driver.core.jobs["a"].ranks[0].pid == first
    commands = driver.end("a", first)
    assert orders(commands, wire.Resume) == [("a", 0)]
    assert driver.core.jobs["a"].ranks[0].pid == second


def test_the_end_of_a_process_that_waits_changes_nothing_for_the_first() -> None:
    driver = fifo()
    driver.submit("a")
    first, _ = driver.come("a")
    driver.train("a", 10)
    second, _ = driver.come("a")
    driver.do(RankGone("a", 0, pid=second))
    assert driver.core.jobs["a"].ranks[0].pid == first
    assert driver.state("a") is JobState.RUNNING
    driver.end("a", first)
    assert driver.core.jobs["a"].processes.idle_since_s is not None


def test_a_process_that_runs_already_cannot_stand_in_line() -> None:
    driver = fifo()
    driver.submit("a")
    driver.come("a")
    driver.train("a", 10)
    hello = wire.Hello(version=1, job="a", rank=0, world_size=1, pid=7, epoch=1, parked=False)
    with pytest.raises(IllegalTransitionError):
        driver.say("a", hello)


def test_a_process_that_ends_while_it_is_told_to_stop_gives_its_device_at_once() -> None:
    driver = Commands(policy=RoundRobin(quantum_s=QUANTUM_S))
    for job in "ab":
        driver.submit(job)
    pid, _ = driver.come("a")
    driver.train("a", 10)
    driver.come("b")
    assert orders(driver.wake(), wire.Suspend) == [("a", 0)]
    commands = driver.end("a", pid)
    assert orders(commands, wire.Resume) == [("b", 0)]
    driver.do(Exited("a", 0))
    assert driver.state("a") is JobState.SUCCEEDED


def test_a_gang_is_followed_by_a_gang_once_all_of_it_is_gone() -> None:
    driver = Commands(device_count=2, policy=Fifo())
    driver.submit("g", 2)
    pids = [driver.come("g", rank)[0] for rank in range(2)]
    for rank in range(2):
        driver.resumed("g", rank)
        driver.progress("g", 10, rank)
    driver.end("g", pids[0], 0)
    early, commands = driver.come("g", 0)
    assert orders(commands, wire.Queued) == [("g", early)]
    driver.end("g", pids[1], 1)
    assert driver.core.jobs["g"].ranks[0].pid == early
    assert driver.state("g") is JobState.RUNNING
    _, commands = driver.come("g", 1)
    assert orders(commands, wire.Resume) == [("g", 0), ("g", 0)]
    for rank in range(2):
        driver.resumed("g", rank)
    assert driver.core.jobs["g"].steps == 10


def test_a_gang_of_which_only_a_part_comes_again_fails() -> None:
    driver = Commands(device_count=2, policy=Fifo())
    driver.submit("g", 2)
    pids = [driver.come("g", rank)[0] for rank in range(2)]
    for rank in range(2):
        driver.resumed("g", rank)
        driver.progress("g", 10, rank)
    for rank in range(2):
        driver.end("g", pids[rank], rank)
    driver.come("g", 0)
    driver.wake(TIMEOUT_S)
    assert driver.state("g") is JobState.SUSPENDED
    assert not driver.core.jobs["g"].lease
    commands = driver.wake(1000.0)
    assert [one for one in commands if isinstance(one, Kill)]
    assert "did not start rank 1" in driver.core.jobs["g"].verdict.reason


def test_steps_of_all_trainings_count_for_the_most_that_a_job_is_to_make() -> None:
    driver = fifo()
    driver.submit("a", max_steps=15)
    pid, _ = driver.come("a")
    driver.train("a", 10)
    driver.end("a", pid)
    driver.come("a")
    driver.train("a", 6)
    assert driver.state("a") is JobState.SUSPENDING
    driver.parked("a", 7)
    assert driver.state("a") is JobState.SUCCEEDED


def test_trainings_that_a_driver_starts_take_its_place_in_turn() -> None:
    driver = Commands(policy=RoundRobin(quantum_s=QUANTUM_S))
    for job in "ab":
        driver.submit(job)
    parent, _ = driver.come("a")
    driver.resumed("a")
    driver.come("b")
    child, commands = driver.come("a", replaces=parent)
    assert orders(commands, wire.Replaced) == [("a", parent)]
    assert orders(commands, wire.Resume) == [("a", 0)]
    driver.train("a", 10)
    sibling, commands = driver.come("a", replaces=parent)
    assert orders(commands, wire.Queued) == [("a", sibling)]
    assert orders(driver.end("a", child), wire.Resume) == [("a", 0)]
    driver.train("a", 5)
    driver.end("a", sibling)
    driver.wake()
    assert driver.state("b") is not JobState.QUEUED  # the parent is there, and holds nothing
    driver.do(RankGone("a", 0, pid=parent))
    driver.do(Exited("a", 0))
    assert driver.state("a") is JobState.SUCCEEDED
    assert driver.core.jobs["a"].steps == 15


def test_a_child_that_claims_while_its_parent_is_told_to_stop_waits_for_the_next_turn() -> None:
    driver = Commands(policy=RoundRobin(quantum_s=QUANTUM_S))
    for job in "ab":
        driver.submit(job)
    parent, _ = driver.come("a")
    driver.resumed("a")
    driver.come("b")
    driver.wake(400.0)  # its set-up takes too long to be none of its service
    driver.wake()
    assert driver.state("a") is JobState.SUSPENDING
    _, commands = driver.come("a", replaces=parent)
    assert orders(commands, wire.Resume) == [("b", 0)]
    assert driver.state("a") is JobState.SUSPENDED


def test_a_process_that_has_nothing_on_its_device_for_too_long_gives_it_up() -> None:
    driver = fifo()
    for job in "ab":
        driver.submit(job)
    driver.come("a")
    driver.resumed("a")
    driver.come("b")
    assert orders(driver.wake(TIMEOUT_S), wire.Withdraw) == [("a", 0)]
    epoch = driver.core.jobs["a"].epoch
    commands = driver.say("a", wire.Withdrawn(epoch=epoch))
    assert orders(commands, wire.Resume) == [("b", 0)]
    assert driver.state("a") is JobState.SUSPENDED
    driver.come("a")  # now it trains
    pid = driver.core.jobs["b"].ranks[0].pid
    driver.train("b", 3)
    driver.end("b", pid)
    assert orders(driver.do(Exited("b", 0)), wire.Resume) == [("a", 0)]


def test_a_process_that_is_told_to_stop_and_has_not_begun_gives_its_device_up_in_the_end() -> None:
    driver = Commands(policy=RoundRobin(quantum_s=QUANTUM_S))
    for job in "ab":
        driver.submit(job)
    driver.come("a")
    driver.resumed("a")
    driver.come("b")
    driver.do(Held("a"))
    assert driver.state("a") is JobState.SUSPENDING
    driver.wake(TIMEOUT_S)
    commands = driver.say("a", wire.Withdrawn(epoch=1))
    assert orders(commands, wire.Resume) == [("b", 0)]


def test_who_stands_in_line_follows_a_process_that_does_not_begin() -> None:
    driver = fifo()
    driver.submit("a")
    first, _ = driver.come("a")
    driver.resumed("a")
    second, _ = driver.come("a")
    commands = driver.wake(TIMEOUT_S)
    assert orders(commands, wire.Replaced) == [("a", first)]
    assert orders(commands, wire.Resume) == [("a", 0)]
    assert driver.core.jobs["a"].ranks[0].pid == second


def test_a_process_that_has_begun_cannot_give_its_place_up() -> None:
    driver = fifo()
    driver.submit("a")
    driver.come("a")
    driver.train("a", 1)
    with pytest.raises(IllegalTransitionError):
        driver.say("a", wire.Withdrawn(epoch=1))


def test_the_set_up_of_the_next_process_is_no_attained_service() -> None:
    driver = fifo()
    driver.submit("a")
    pid, _ = driver.come("a")
    driver.train("a", 1)
    driver.now_s += 10.0
    driver.progress("a", 10)
    driver.end("a", pid)
    driver.now_s += 2.0
    driver.come("a")
    driver.resumed("a")
    driver.now_s += 3.0
    driver.progress("a", 1)
    driver.now_s += 20.0
    driver.progress("a", 20)
    assert driver.core.jobs["a"].service_at(driver.now_s) == pytest.approx(32.0)
    assert driver.core.jobs["a"].setup_at(driver.now_s) == pytest.approx(3.0)


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_scheduler_that_is_started_again_is_the_same_at_every_moment(cut: int) -> None:
    driver = Commands(policy=RoundRobin(quantum_s=QUANTUM_S))
    for job in "ab":
        driver.submit(job)
    pid, _ = driver.come("a")
    driver.train("a", 10)
    driver.come("b")
    driver.come("a")
    driver.end("a", pid)
    driver.train("a", 4)
    driver.wake()
    rest = driver.journal[cut:]
    del driver.journal[cut:]
    again = driver.replayed(RoundRobin(quantum_s=QUANTUM_S))
    for event, now_s in rest:
        again.handle(event, now_s)
    assert picture(again) == picture(driver.core)


def pair_with_a_child() -> tuple[Commands, int, int]:
    """Job a trains, and so does a child of its process; job b waits."""
    driver = Commands(policy=RoundRobin(quantum_s=QUANTUM_S))
    for job in "ab":
        driver.submit(job)
    parent, _ = driver.come("a")
    driver.train("a", 10)
    driver.come("b")
    child, commands = driver.come("a", replaces=parent)
    assert orders(commands, wire.Queued) == [("a", child)]
    return driver, parent, child


def test_a_child_trains_beside_its_parent_and_the_job_is_not_suspended_meanwhile() -> None:
    driver, _, child = pair_with_a_child()
    assert orders(driver.progress("a", 11), wire.Beside) == [("a", child)]
    for _ in range(3):
        commands = driver.wake(TIMEOUT_S)
        assert orders(commands, wire.Suspend) == []
        assert driver.core.jobs["a"].lease == driver.core.jobs["a"].wanted
    driver.do(RankGone("a", 0, pid=child))
    assert orders(driver.wake(QUANTUM_S), wire.Suspend) == [("a", 0)]


def test_a_child_holds_still_until_the_lease_is_its_jobs() -> None:
    driver, _, child = pair_with_a_child()
    assert orders(driver.wake(), wire.Suspend) == [("a", 0)]
    assert orders(driver.progress("a", 11), wire.Beside) == []
    driver.parked("a", driver.core.jobs["a"].asked.stop_at)
    driver.train("b", 5)
    driver.wake()
    driver.parked("b", driver.core.jobs["b"].asked.stop_at)
    driver.resumed("a")
    assert orders(driver.progress("a", 13), wire.Beside) == [("a", child)]


def test_a_child_is_the_rank_when_the_process_beside_it_has_ended() -> None:
    driver, parent, child = pair_with_a_child()
    driver.progress("a", 11)
    commands = driver.end("a", parent)
    assert orders(commands, wire.Resume) == [("a", 0)]
    assert driver.core.jobs["a"].ranks[0].pid == child
    driver.train("a", 4)
    assert orders(driver.wake(), wire.Suspend) == [("a", 0)]


def test_a_child_that_says_hello_again_is_still_beside_the_rank() -> None:
    driver, parent, child = pair_with_a_child()
    driver.progress("a", 11)
    hello = wire.Hello(
        version=1, job="a", rank=0, world_size=1, pid=child, epoch=0, parked=False, replaces=parent
    )
    assert orders(driver.say("a", hello), wire.Beside) == [("a", child)]


@pytest.mark.parametrize("says_bye", [True, False])
def test_a_process_that_has_executed_another_program_is_the_rank_again(says_bye: bool) -> None:
    driver = fifo()
    driver.submit("a")
    pid, _ = driver.come("a")
    driver.train("a", 10)
    job = driver.core.jobs["a"]
    if says_bye:
        driver.say("a", wire.Bye(epoch=job.epoch, boundary=10, step=10))
    hello = wire.Hello(version=1, job="a", rank=0, world_size=1, pid=pid)
    assert orders(driver.say("a", hello), wire.Resume) == [("a", 0)]
    driver.train("a", 3)
    assert (driver.state("a"), job.steps) == (JobState.RUNNING, 13)
