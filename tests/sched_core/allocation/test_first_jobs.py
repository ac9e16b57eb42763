"""An array starts with one job, until it is known what memory its jobs need; and nobody waits for ever."""

from __future__ import annotations

import pytest

from gpuslice import wire
from gpuslice.sched_core.cluster import Cluster
from gpuslice.sched_core.job import Job, JobSpec
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Held, Limited, Released
from gpuslice.sched_core.policies.gandiva.live_packing import _fit
from gpuslice.sched_core.policies.rr import RoundRobin
from gpuslice.sched_core.policy import View

from ..driver import QUANTUM_S, notices, picture
from .test_starts import Day


def array_day(count: int = 3, devices: int = 3, **fields: object) -> Day:
    """Array s, all of whose processes have come."""
    day = Day(devices)
    day.ask_many("s", count, **fields)
    for number in range(count):
        if day.starts(f"s-{number}"):
            day.hello(f"s-{number}")
    return day


def leased(day: Day) -> list[str]:
    return [name for name, job in day.core.jobs.items() if job.lease]


def trains(day: Day, job: str, steps: int, peak_bytes: int = 0) -> list[str]:
    """A job reports its steps. Return the notices that follow."""
    if day.state(job) is JobState.STARTING:
        day.resumed(job)
    epoch = day.job(job).epoch
    message = wire.Progress(epoch=epoch, boundary=steps, step=steps, peak_bytes=peak_bytes)
    return [notice.what for notice in notices(day.say(job, message))]


def replays(day: Day) -> bool:
    return picture(day.replayed(RoundRobin(quantum_s=QUANTUM_S))) == picture(day.core)


def test_the_others_follow_once_the_first_ones_need_was_measured() -> None:
    day = array_day()
    assert leased(day) == ["s-0"]
    assert day.why("s-2") == (
        "array s starts with one job, to learn what memory its jobs need (--memory): s-0"
    )
    trains(day, "s-0", 2)
    assert leased(day) == ["s-0"]
    assert "array_starts" in trains(day, "s-0", 3, 100)
    assert leased(day) == ["s-0", "s-1", "s-2"]
    assert day.core.allocation.quotas.array_bytes == {"s": 100}
    trains(day, "s-1", 3, 150)
    assert day.core.allocation.quotas.array_bytes == {"s": 150}
    assert replays(day)


def test_a_device_that_measures_nothing_keeps_nobody_waiting() -> None:
    day = array_day()
    trains(day, "s-0", 4)
    assert leased(day) == ["s-0"]
    trains(day, "s-0", 5)
    assert leased(day) == ["s-0", "s-1", "s-2"]


@pytest.mark.parametrize("fields", [{"device_memory_bytes": 5}, {"at_once": 1}])
def test_nothing_is_to_be_learnt(fields: dict[str, object]) -> None:
    day = array_day(**fields)
    assert day.core.allocation.quotas.first == {}
    assert leased(day) == (["s-0"] if "at_once" in fields else ["s-0", "s-1", "s-2"])


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("code", [0, -9])
def test_the_others_follow_one_that_has_ended_or_failed(code: int, restarts: int) -> None:
    day = array_day(max_restarts=restarts)
    day.end("s-0", code)
    assert leased(day) == ["s-1", "s-2"]
    assert replays(day)


def test_of_a_first_one_that_is_cancelled_or_held_the_next_takes_the_place() -> None:
    day = array_day(4)
    day.do(Held("s-0"))
    day.resumed("s-0")
    day.parked("s-0", day.job("s-0").asked.stop_at)
    assert leased(day) == ["s-1"]
    day.do(Released("s-0"))
    assert leased(day) == ["s-1"], "it queues again"
    day.do(Cancelled("s-2", "enough"))
    assert leased(day) == ["s-1"]
    day.do(Cancelled("s-1", "enough"))
    day.end("s-1", -15)
    assert leased(day) == ["s-3"]
    trains(day, "s-3", 3, 100)
    assert leased(day) == ["s-0", "s-3"]
    assert replays(day)


def test_all_held_then_the_first_that_is_released_is_the_first() -> None:
    day = array_day(hold=True)
    for number in (2, 1):
        day.do(Released(f"s-{number}"))
        day.hello(f"s-{number}")
    assert leased(day) == ["s-2"]


def test_the_others_wait_a_minute_for_a_process_that_does_not_come() -> None:
    day = Day(3)
    day.ask_many("s", 3)
    day.hello("s-1")
    assert leased(day) == []
    day.wake(59.0)
    assert leased(day) == []
    day.wake(1.0)
    assert leased(day) == ["s-1"]
    day.hello("s-2")
    assert leased(day) == ["s-1", "s-2"]
    assert replays(day)


def test_the_others_wait_a_minute_for_one_that_is_on_its_device_and_makes_no_step() -> None:
    day = array_day()
    day.resumed("s-0")
    for _ in range(59):
        day.wake(1.0)
    assert leased(day) == ["s-0"]
    day.wake(1.0)
    assert leased(day) == ["s-0", "s-1", "s-2"]


def test_time_without_a_device_does_not_count() -> None:
    day = Day(1)
    day.ask("a")
    day.run("a")
    day.ask_many("s", 2, priority=-1)
    for number in range(2):
        day.hello(f"s-{number}")
    for _ in range(100):
        day.wake(1.0)
        day.progress("a", 20)
    assert day.core.allocation.quotas.first["s"].inside == ["s-0"]
    day.end("a")
    assert leased(day) == ["s-0"]


def test_trials_wait_for_the_first_job_and_for_their_arrays_places() -> None:
    day = array_day(trial_batches=2, at_once=2)
    assert leased(day) == ["s-0"]
    trains(day, "s-0", 1, 100)
    assert leased(day) == ["s-0", "s-1"]
    day.resumed("s-1")
    day.end("s-0")
    assert leased(day) == ["s-1", "s-2"]


def test_a_process_is_started_ahead_only_for_the_first_one() -> None:
    day = Day(2)
    day.do(Limited(2))
    day.ask_many("s", 3)
    assert [day.starts(f"s-{number}") for number in range(3)] == [True, False, False]
    day.hello("s-0")
    trains(day, "s-0", 3, 100)
    assert day.starts("s-1")


def test_a_job_of_an_array_counts_with_what_another_one_used_until_it_was_measured_itself() -> None:
    first, other = (Job(JobSpec(id=f"s-{n}", submit_s=0.0, array="s"), n) for n in range(2))
    first.peak_bytes = 40
    view = View(Cluster([1]), {})
    view.device_memory_bytes = 100
    assert not _fit(first, other, view), "nothing is known of it"
    view.array_bytes = {"s": 40}
    assert _fit(first, other, view)
    other.peak_bytes = 50
    assert not _fit(first, other, view)
