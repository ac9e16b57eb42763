"""What the core does with plans: whole or not at all, and what becomes of a policy that fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuslice import wire
from gpuslice.sched_core.core.events import Cancelled, Noted
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.policy import Migrate, Plan, PolicyError, Start, Suspend, View

from ..driver import Driver, Scripted, notices, picture, told


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
    said, waits = 0, []
    for _ in range(10):
        policy.next = unknown
        said += len(notices(driver.wake()))
        waits.append(driver.core.planning.wake_s or 0.0)
        waits[-1] -= driver.now_s
    assert said == 1
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    for _ in range(1100):
        policy.next = unknown
        assert not notices(driver.wake()), "however often"
    driver.wake()
    policy.next = unknown
    assert len(notices(driver.wake())) == 1, "it had recovered in between"


def test_a_plan_that_hands_a_device_over_is_entered_as_a_whole() -> None:
    policy = Scripted()
    driver = Driver(policy=policy)
    driver.running_pair()
    policy.next = lambda _: Plan([Start("b", (0,)), Suspend("a")])
    assert [job for job, _, _ in told(driver.wake(), wire.Suspend)] == ["a"]
    assert [job for job, _, _ in told(driver.parked("a", 11), wire.Resume)] == ["b"]
