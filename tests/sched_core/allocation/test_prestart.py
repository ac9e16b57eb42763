"""A long queue costs nothing before its turn: who is started, in which order, and what the rest can do."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.errors import IllegalTransitionError
from gpuslice.sched_core.allocation.prestart import HELLO_TIMEOUT_S
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.rank import RankPhase
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.jobs.wait_reasons import Delays
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Command,
    Exited,
    Held,
    Launch,
    Limited,
    RankGone,
    Released,
    Submitted,
    Weighted,
)
from gpuslice.sched_core.policies.registry import make_policy
from gpuslice.sched_core.policy import Policy

from ..driver import PROGRAM, Driver, Scripted, devices, picture


class Queue(Driver):
    """A driver that notes who is started, with a limit."""

    def __init__(self, device_count: int, limit: int, policy: Policy | None = None, **limits: Any) -> None:
        super().__init__(device_count, policy, **limits)
        self.started: list[str] = []
        self.do(Limited(limit))

    def do(self, event: Any) -> list[Command]:
        commands = super().do(event)
        self.started += [command.job for command in commands if isinstance(command, Launch)]
        return commands

    def hand_in(self, job: str, **wishes: Any) -> None:
        self.do(Submitted(JobSpec(id=job, submit_s=self.now_s, **wishes), PROGRAM))

    def begin(self, job: str) -> None:
        """It says Hello, and everybody does as they are told."""
        self.hello(job)
        self.settle()

    def settle(self) -> None:
        for job in list(self.core.jobs.values()):
            for rank in job.present(RankPhase.ON):
                if job.state is JobState.SUSPENDING:
                    self.parked(job.id, job.asked.stop_at, rank.number)
        for job in list(self.core.jobs.values()):
            for rank in job.present(RankPhase.COMING):
                self.resumed(job.id, rank.number)
                self.progress(job.id, 5, rank.number)

    def finish(self, job: str) -> None:
        for rank in self.core.jobs[job].there():
            self.do(RankGone(job, rank.number))
        self.do(Exited(job, 0))
        self.settle()


def waiting(core: Core) -> list[str]:
    return [job.id for job in core.jobs.values() if not job.command.launched and not job.state.ended]


@pytest.mark.parametrize("policy", ["fifo", "rr", "2das", "las", "gittins", "smallest", "gandiva", "drf"])
def test_only_so_many_are_started_and_all_come_to_their_turn(policy: str) -> None:
    queue = Queue(2, 2, make_policy(policy, {}))
    jobs = [f"j{number}" for number in range(30)]
    for job in jobs:
        queue.hand_in(job)
    assert queue.started == jobs[:4]
    done: set[str] = set()
    while len(done) < len(jobs):
        for job in [job for job in queue.started if job not in done]:
            if not queue.core.jobs[job].ready:
                queue.begin(job)
        alive = [job for job in queue.started if job not in done]
        assert len(alive) <= 4, "two that run and two more"
        running = [job for job in alive if queue.state(job) is JobState.RUNNING]
        queue.finish(running[0])
        done.add(running[0])
    assert queue.started == jobs


def test_who_is_ready_sooner_than_those_that_an_idle_device_waits_for_brings_nobody_more() -> None:
    queue = Queue(2, 2, make_policy("fifo", {}))
    for number in range(20):
        queue.hand_in(f"j{number}")
    assert queue.started == ["j0", "j1", "j2", "j3"]
    for job in ("j2", "j3"):
        queue.begin(job)
    assert queue.started == ["j0", "j1", "j2", "j3"], "two run, two more are coming"
    queue.finish("j2")
    assert queue.started == ["j0", "j1", "j2", "j3", "j4"]


def test_they_are_started_in_the_order_in_which_the_policy_takes_them() -> None:
    queue = Queue(1, 1, make_policy("srtf", {}))
    for job, expected_s in {"a": 50.0, "b": 60.0, "c": 300.0, "d": 100.0, "e": 200.0}.items():
        queue.hand_in(job, expected_s=expected_s)
    for job in "abdec":
        assert job in queue.started
        queue.begin(job)
        assert queue.started[-1] != job or job == "c", "the next one imports while this one runs"
        queue.finish(job)
    assert queue.started == list("abdec")


def test_who_is_more_urgent_than_those_that_were_started_does_not_wait_for_them() -> None:
    queue = Queue(1, 1, make_policy("srtf", {}))
    for job, expected_s in {"a": 100.0, "b": 300.0, "c": 400.0}.items():
        queue.hand_in(job, expected_s=expected_s)
        if job == "a":
            queue.begin("a")
    assert queue.started == ["a", "b"]
    queue.hand_in("urgent", expected_s=1.0)
    assert queue.started == ["a", "b", "urgent"]


def test_without_a_limit_each_is_started_at_once() -> None:
    driver = Driver(1)
    for job in "abc":
        assert Launch(job, PROGRAM) in driver.submit(job)


def test_with_a_limit_of_none_one_is_started_when_a_device_is_free() -> None:
    queue = Queue(1, 0)
    for job in "abc":
        queue.hand_in(job)
    queue.begin("a")
    assert queue.started == ["a"]
    queue.finish("a")
    assert queue.started == ["a", "b"]


def test_another_limit_counts_from_then_on() -> None:
    queue = Queue(1, 1)
    for number in range(9):
        queue.hand_in(f"j{number}")
    queue.begin("j0")
    assert len(queue.started) == 2
    queue.do(Limited(5))
    assert queue.started == [f"j{number}" for number in range(6)]
    queue.do(Limited(1))
    for number in range(5):
        queue.finish(f"j{number}")
        queue.begin(f"j{number + 1}")
    assert len(queue.started) == 7, "one runs, one more is ready"


@pytest.mark.parametrize("policy", ["fifo", "rr", "2das"])
def test_a_gang_of_all_devices_is_started_though_smaller_ones_keep_coming(policy: str) -> None:
    queue = Queue(2, 1, make_policy(policy, {}))
    queue.hand_in("a")
    queue.begin("a")
    queue.hand_in("gang", devices=2)
    for number in range(5):
        queue.hand_in(f"j{number}")
    assert "gang" in queue.started
    queue.hello("gang")
    for job in [job for job in queue.started if job.startswith("j")]:
        queue.begin(job)
    while queue.core.jobs["gang"].first_start_s is None and not queue.core.jobs["gang"].lease:
        running = [job for job in queue.started if queue.core.jobs[job].lease]
        queue.finish(running[0])
        for job in [job for job in queue.started if not queue.core.jobs[job].ready]:
            queue.begin(job)


def test_one_that_was_never_started_can_be_cancelled_held_and_released() -> None:
    queue = Queue(1, 0)
    for job in "abcd":
        queue.hand_in(job)
    queue.begin("a")
    queue.do(Cancelled("b", "enough"))
    assert (queue.state("b"), queue.core.jobs["b"].processes_gone) == (JobState.CANCELLED, True)
    queue.do(Held("c"))
    queue.finish("a")
    assert queue.started == ["a", "d"]
    queue.begin("d")
    queue.do(Released("c"))
    assert queue.started == ["a", "d"], "it queues again"
    queue.do(Weighted("c", 2.0))
    queue.finish("d")
    queue.begin("c")
    assert queue.started == ["a", "d", "c"]
    assert queue.state("c") is JobState.RUNNING
    assert queue.core.jobs["c"].without_devices_at(queue.now_s) == 0.0


def test_waiting_to_be_started_is_waiting_and_not_fragmentation() -> None:
    queue = Queue(2, 0, make_policy("fifo", {}))
    for job in "abc":
        queue.hand_in(job)
    queue.begin("a")
    queue.now_s += 4.0
    job = queue.core.jobs["c"]
    assert job.without_devices_at(queue.now_s) == 4.0
    assert queue.core.allocation.waits.delays(job, queue.now_s) == Delays(0.0, 0.0)


def test_one_that_failed_takes_its_turn_to_be_started_again() -> None:
    queue = Queue(1, 1)
    queue.hand_in("a", max_restarts=1)
    queue.begin("a")
    for job in "bc":
        queue.hand_in(job)
    assert queue.started == ["a", "b"]
    queue.do(RankGone("a", 0))
    queue.do(Exited("a", -9))
    queue.begin("b")
    assert queue.started == ["a", "b", "c"]
    queue.wake(1.0)
    assert queue.started == ["a", "b", "c"], "c came first and is next"
    queue.finish("b")
    queue.begin("c")
    assert queue.started == ["a", "b", "c", "a"]
    queue.begin("a")
    queue.finish("c")
    assert queue.core.jobs["a"].lease


def test_one_that_is_held_while_it_waits_for_its_next_attempt_is_started_when_released() -> None:
    queue = Queue(1, 1)
    queue.hand_in("a", max_restarts=1)
    queue.begin("a")
    queue.do(RankGone("a", 0))
    queue.do(Exited("a", -9))
    queue.do(Held("a"))
    queue.wake(1.0)
    assert queue.started == ["a"]
    queue.do(Released("a"))
    assert queue.started == ["a", "a"]


def test_a_trial_comes_before_the_queue() -> None:
    queue = Queue(1, 1)
    for job in "abc":
        queue.hand_in(job)
    queue.begin("a")
    queue.hand_in("tried", trial_batches=3)
    assert queue.started == ["a", "b", "tried"], "its turn is before that of b"


def test_who_has_no_part_of_the_quota_is_not_started_and_takes_nobodys_place() -> None:
    queue = Queue(2, 2, quotas={"t": 1})
    for job in "abc":
        queue.hand_in(job, tenant="t")
    queue.hand_in("other")
    assert queue.started == ["a", "other"]
    for job in ("a", "other"):
        queue.begin(job)
    assert queue.started == ["a", "other"]
    job, then_s = queue.core.jobs["b"], queue.now_s + 1.0
    waits = queue.core.allocation.waits.delays(job, then_s)
    assert waits.fair_share_s == job.without_devices_at(then_s) > 0
    queue.finish("a")
    assert queue.started == ["a", "other", "b"]


def test_what_never_says_hello_does_not_block_the_queue() -> None:
    queue = Queue(1, 1)
    for job in ("mute", "dumb", "a", "b", "c"):
        queue.hand_in(job)
    assert queue.started == ["mute", "dumb"]
    queue.wake(HELLO_TIMEOUT_S)
    assert queue.started == ["mute", "dumb", "a", "b"]
    for job in "ab":
        queue.begin(job)
    queue.finish("b")
    queue.hello("mute")
    queue.finish("a")
    assert queue.core.jobs["mute"].lease


def test_a_policy_that_cannot_be_copied_has_them_started_as_they_came() -> None:
    policy = Scripted()
    policy.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    queue = Queue(1, 1, policy)
    for job in "abc":
        queue.hand_in(job)
    queue.begin("a")
    assert (queue.started, waiting(queue.core)) == (["a", "b"], ["c"])


def test_a_policy_that_fails_has_them_started_as_they_came() -> None:
    class Broken(Scripted):
        def plan(self, view: Any) -> Any:
            if len(view.jobs) > 1:
                raise ZeroDivisionError
            return super().plan(view)

    queue = Queue(1, 1, Broken())
    for job in "abc":
        queue.hand_in(job)
    queue.begin("a")
    queue.finish("a")
    queue.begin("b")
    assert queue.started == ["a", "b", "c"]


def test_whom_the_policy_refuses_is_started_so_that_it_can_say_so() -> None:
    queue = Queue(1, 1, make_policy("chronus", {"lease_s": "10", "best_effort_lease_s": "5"}))
    queue.hand_in("best")
    queue.begin("best")
    queue.hand_in("late", deadlines=((1.0, 1.0),), guaranteed=True, expected_s=500.0)
    assert "late" in queue.started


def test_nobody_speaks_for_a_job_that_is_not_started() -> None:
    queue = Queue(1, 1)
    for job in "abc":
        queue.hand_in(job)
    with pytest.raises(IllegalTransitionError, match="Hello"):
        queue.hello("c")
    assert not queue.core.jobs["c"].ready


def test_a_replayed_core_knows_who_is_started() -> None:
    queue = Queue(2, 1, make_policy("2das", {}))
    for number in range(8):
        queue.hand_in(f"j{number}", devices=1 + number % 2)
    for job in list(queue.started):
        queue.begin(job)
    queue.do(Held("j7"))
    queue.finish(next(job for job in queue.started if queue.core.jobs[job].lease))
    again = Core(devices(2), make_policy("2das", {}))
    launched = [
        command.job
        for event, now in queue.journal
        for command in again.handle(event, now)
        if isinstance(command, Launch)
    ]
    assert launched == queue.started
    assert picture(again) == picture(queue.core)


def test_of_three_thousand_the_policy_sees_those_that_are_ready() -> None:
    queue = Queue(2, 2, make_policy("fifo", {}))
    core = queue.core
    for number in range(3000):
        core.handle(Submitted(JobSpec(id=f"j{number}", submit_s=1.0), PROGRAM), 1.0)
    assert sum(job.command.launched for job in core.jobs.values()) == 4
    assert not core.allocation.eligibility.eligible
