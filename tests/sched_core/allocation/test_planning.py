"""What the core does with plans: whole or not at all, and what becomes of a policy that fails."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest

from gpuslice import wire
from gpuslice.sched_core.core.core import ASK_AGAIN_S, MOST_PLANS
from gpuslice.sched_core.job import JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Cancelled,
    Held,
    Launch,
    Limited,
    Noted,
    Notice,
    Submitted,
    WakeAt,
)
from gpuslice.sched_core.policy import Migrate, Plan, PolicyError, Start, Suspend, View

from ..driver import PROGRAM, Driver, Scripted, notices, picture, told


def broken(view: View) -> Plan:
    return {}[view.now_s]  # type: ignore[no-any-return]


def unknown(view: View) -> Plan:
    raise PolicyError("the duration of job a is not known", "state it")


IMPOSSIBLE: list[tuple[Callable[[View], Plan], str, str]] = [
    (broken, "KeyError", "none"),
    (unknown, "duration of job a is not known", "none"),
    (
        lambda _: Plan([Suspend("a"), Start("b", (5,))]),
        "device 5 does not exist",
        "suspend a, start b on [5]",
    ),
    (lambda _: Plan([Suspend("a"), Suspend("a")]), "two decisions on job a", "suspend a, suspend a"),
    (lambda _: Plan([Start("b", (0,))]), "a holds it", "start b on [0]"),
    (lambda _: Plan([Migrate("a", (0, 1))]), "asks for 1 devices and is given 2", "migrate a on [0, 1]"),
    (lambda _: Plan([Suspend("z")]), "no unfinished job 'z'", "suspend z"),
    (lambda view: Plan((), view.now_s), "to be woken at", "[]"),
]


@pytest.mark.parametrize(("script", "error", "plan"), IMPOSSIBLE)
def test_an_impossible_plan_is_reported_and_changes_nothing(
    script: Callable[[View], Plan], error: str, plan: str
) -> None:
    policy = Scripted()
    driver = Driver(policy=policy)
    driver.running_pair()
    resets = policy.resets
    before = picture(driver.core)
    policy.next = script
    (notice,) = notices(driver.wake())
    assert notice.what == "policy_failed"
    assert notice.details["policy"] == "scripted"
    assert error in str(notice.details["error"])
    assert plan in str(notice.details["plan"])
    assert picture(driver.core) == before
    assert driver.do(Noted(notice.what, notice.job, notice.details)) == []
    assert driver.state("a") is JobState.RUNNING
    driver.do(Cancelled("a", "enough"))
    assert policy.resets == resets + 1, "it starts again from the whole picture"
    assert driver.core.jobs["b"].wanted == (0,), "and decides again"


def test_a_policy_that_keeps_failing_is_reported_once_and_asked_less_and_less_often() -> None:
    policy = Scripted()
    driver = Driver(policy=policy)
    driver.running_pair()
    said, waits, wait_s = 0, [], 1.0
    for _ in range(10):
        policy.next = unknown
        said += len(notices(driver.wake(wait_s)))
        wait_s = (driver.core.allocation.planning.wake_s or 0.0) - driver.now_s
        waits.append(wait_s)
    assert said == 1
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    policy.next = unknown
    for job in range(59):
        driver.submit(f"job-{job}")
        assert not notices(driver.wake()), "however much happens meanwhile"
        assert policy.next is unknown, "it is not asked"
    driver.wake()
    assert policy.next is None
    driver.wake(60.0)
    policy.next = unknown
    assert len(notices(driver.wake())) == 1, "it had recovered in between"


def test_a_job_that_is_held_while_the_policy_fails_holds_nothing() -> None:
    policy = Scripted()
    driver = Driver(policy=policy)
    driver.running_pair()
    for _ in range(2):
        policy.next = unknown
        driver.wake()
    driver.do(Held("a"))
    assert not driver.core.jobs["a"].running
    assert driver.core.ledger.free == 1


NONSENSE: list[tuple[object, str]] = [
    (None, "returned None instead of a Plan"),
    ([], "returned a list instead of a Plan"),
    (Plan(None), "decisions that are no list"),
    (Plan(["a"]), "no decision"),
    (Plan([Suspend(7)]), "no decision"),
    (Plan([Start("b", None)]), "gives job b devices None"),
    (Plan([Start("b", ("0",))]), "gives job b devices ('0',)"),
    (Plan([Start("b", (0.0,))]), "gives job b devices (0.0,)"),
    (Plan([Start("b", (-1,))]), "device -1 does not exist"),
    (Plan((), nan), "to be woken at nan, which is no time"),
    (Plan((), "soon"), "to be woken at 'soon', which is no time"),
    (Plan((), -inf), "to be woken at -inf"),
    (Plan((), -1.0), "to be woken at -1.0"),
]


@pytest.mark.parametrize(("plan", "error"), NONSENSE)
def test_nonsense_is_named_and_changes_nothing(plan: object, error: str) -> None:
    policy = Scripted()
    driver = Driver(policy=policy)
    driver.running_pair()
    before = picture(driver.core)
    policy.next = lambda _: plan
    (notice,) = notices(driver.wake())
    assert (notice.what, notice.details["policy"]) == ("policy_failed", "scripted")
    assert "policy scripted" in str(notice.details["error"])
    assert error in str(notice.details["error"])
    assert picture(driver.core) == before


def test_a_policy_that_returns_nothing_takes_nobody_along_who_waits_to_be_started() -> None:
    policy = Scripted()
    driver = Driver(policy=policy)
    policy.plan = lambda _: None
    driver.do(Limited(1))
    launched = [command for command in driver.submit("a") if isinstance(command, Launch)]
    assert [command.job for command in launched] == ["a"]


def test_a_plan_that_hands_a_device_over_is_entered_as_a_whole() -> None:
    policy = Scripted()
    driver = Driver(policy=policy)
    driver.running_pair()
    policy.next = lambda _: Plan([Start("b", (0,)), Suspend("a")])
    assert [job for job, _, _ in told(driver.wake(), wire.Suspend)] == ["a"]
    assert [job for job, _, _ in told(driver.parked("a", 11), wire.Resume)] == ["b"]


def test_a_heartbeat_at_which_the_policy_plans_orders_something_so_that_the_journal_keeps_it() -> None:
    """Replayed without it, a policy would be asked at another moment, and could decide otherwise."""
    policy = Scripted()
    driver = Driver(policy=policy)
    driver.do(Submitted(JobSpec(id="a", submit_s=driver.now_s, max_steps=12), PROGRAM))
    driver.hello("a")
    driver.resumed("a")
    driver.progress("a", 10)
    policy.next = lambda view: Plan([Suspend("a")])
    driver.core.state.plan_due = True
    driver.wake()
    assert driver.state("a") is JobState.SUSPENDING
    assert driver.progress("a", 11) == []
    plans = driver.core.allocation.planning.plans
    assert driver.progress("a", 12) == [Notice("planned", "a")], "it has made its steps"
    assert driver.core.allocation.planning.plans > plans


@pytest.mark.parametrize(("times", "asked"), [(0, 1), (2, 3), (inf, MOST_PLANS)])
def test_a_policy_of_many_minds_is_asked_again_later(
    times: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, decided = Driver(), list[float]()

    def decide(now: float) -> None:
        decided.append(now)
        driver.core.state.plan_due = len(decided) <= times

    monkeypatch.setattr(driver.core.allocation, "decide", decide)
    commands = driver.wake()
    assert len(decided) == asked
    assert commands == ([] if times < inf else [WakeAt(driver.now_s + ASK_AGAIN_S)])
