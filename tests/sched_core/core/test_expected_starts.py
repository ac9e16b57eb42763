"""The expected start of a job: only what follows from what people have stated, never a guess."""

from __future__ import annotations

import pytest

from gpuslice.sched_core.core.expected_starts import expected_start
from gpuslice.sched_core.lifecycle.events import Drained, Held, Paused, Reserved
from gpuslice.sched_core.policies.registry import make_policy

from ..allocation.test_starts import NOON, Day


def fifo(devices: int = 1) -> Day:
    return Day(devices, policy=make_policy("fifo", {}))


def expected(day: Day, job: str) -> tuple[float, str, str] | None:
    """In how many seconds it is to start, what that is worth, and why."""
    found = expected_start(day.core, day.job(job), day.now_s)
    return None if found is None else (round(found.when_s - day.now_s, 3), found.bound, found.reason)


def test_a_job_with_a_moment_does_not_start_before_it() -> None:
    day = Day()
    day.ask("a", begin_unix_s=NOON + 60.0)
    assert expected(day, "a") == (60.0, "not before", "--begin")
    day.do(Held("a"))
    assert expected(day, "a") is None, "its owner holds it"


def test_a_job_waits_for_enough_devices_to_open() -> None:
    day = Day(3)
    for device, end_s in (("null:0", 50.0), ("null:1", 90.0)):
        day.do(Paused((device,), NOON, NOON + end_s))
    reserved = Reserved("r1", ("null:2",), NOON, NOON, NOON + 70.0, "ann")
    day.do(reserved)
    for job, ranks in (("one", 1), ("two", 2)):
        day.ask(job, devices=ranks)
    assert expected(day, "one") == (50.0, "not before", "its devices are closed")
    assert expected(day, "two") == (70.0, "not before", "its devices are closed")
    day.ask("ann", tenant="ann")
    day.hello("ann")
    assert expected(day, "ann") is None, "it has its device"
    day.do(Paused(("null:0",), NOON))
    day.do(Drained(("null:1",)))
    assert expected(day, "one") == (70.0, "not before", "its devices are closed")
    assert expected(day, "two") is None, "nobody knows when a second one opens"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"expected_s": 100.0}, (90.0, "about", "--duration of a")),
        ({"time_limit_s": 50.0, "grace_s": 5.0}, (45.0, "at the latest", "--time-limit of a")),
        ({"expected_s": 20.0, "time_limit_s": 50.0}, (10.0, "about", "--duration of a")),
        ({}, None),
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_under_fifo_the_next_job_starts_when_the_one_before_it_ends(
    fields: dict[str, object], found: object, after: bool
) -> None:
    day = fifo()
    day.ask("a", **fields)
    day.run("a")
    day.ask("b", after=("a",) if after else ())
    if not after:
        day.hello("b")
    day.now_s += 10.0
    assert expected(day, "b") == found
    day.ask("c")
    day.hello("c")
    assert expected(day, "c") == (found if after else None), "the end of b is not known"


def test_of_several_devices_as_many_as_it_needs_count() -> None:
    day = fifo(3)
    for job, expected_s in (("a", 30.0), ("b", 20.0), ("c", 0.0)):
        day.ask(job, expected_s=expected_s)
        day.run(job)
    day.ask("two", devices=2)
    day.hello("two")
    assert expected(day, "two") == (30.0, "about", "--duration of b, --duration of a")
    day.ask("first", priority=1, devices=3)
    day.hello("first")
    assert expected(day, "two") is None, "another job is before it"
    assert expected(day, "first") is None, "c has stated no end"


def test_under_a_policy_that_takes_devices_away_nothing_is_known() -> None:
    day = Day()
    day.ask("a", expected_s=100.0)
    day.run("a")
    day.ask("b")
    day.hello("b")
    day.ask("c", after=("a",))
    assert expected(day, "b") is None
    assert expected(day, "c") is None


def test_a_job_that_failed_is_started_again_after_its_pause() -> None:
    day = Day()
    day.ask("a", max_restarts=1)
    day.run("a")
    day.end("a", -9)
    assert expected(day, "a") == (1.0, "not before", "the pause before it is started again")
