"""``down --keep``: who cannot be kept is named and all go on; else all end, and the snapshots are moved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest

from gpuslice.errors import EnvironmentUnusableError, GpusliceError
from gpuslice.sched_core.jobs.facts import Keep
from gpuslice.sched_core.jobs.kept import KeptJobs
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import Cancelled, Event, Exited, Kept, Kill, RankGone
from gpuslice.sched_core.live.keeping import Keeping, release
from gpuslice.sched_core.live.scheduler import Scheduler

from ...patience import PATIENCE_S
from ..driver import Driver, suspended


class Shelf:
    """Remembers what it was to keep; raises what it is told."""

    def __init__(self) -> None:
        self.no_room: GpusliceError | None = None
        self.broken: Exception | None = None
        self.kept: dict[str, int] = {}
        self.unwritable: GpusliceError | None = None
        self.noted: list[KeptJobs] = []
        #: Set unless moving the snapshots is to take until then.
        self.may_end = threading.Event()
        self.may_end.set()

    def check(self) -> None:
        if self.no_room:
            raise self.no_room

    def store(self, kept: dict[str, int]) -> None:
        self.kept = kept
        assert self.may_end.wait(PATIENCE_S)
        if self.broken:
            raise self.broken

    def note(self, jobs: KeptJobs) -> None:
        if self.unwritable:
            raise self.unwritable
        self.noted.append(jobs)

    def begin(self) -> None:
        self.noted.clear()


class House:
    """A core behind the few methods of a scheduler that ``Keeping`` uses."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.core = self.driver.core
        self.kills: list[str] = []
        self.asked: list[tuple[Keep | None, str]] = []
        self.shelf, self.refused = Shelf(), list[GpusliceError]()
        self.keeping = Keeping(cast(Scheduler, self), self.shelf)

    def register(self, source: int, handler: object) -> None:
        """Nobody polls here."""

    def now(self) -> float:
        return self.driver.now_s

    def apply_request(self, event: Event) -> None:
        assert isinstance(event, Kept)
        self.asked.append((event.keep, event.job))
        self.kills += [one.job for one in self.driver.do(event) if isinstance(one, Kill)]

    def begin(self) -> None:
        self.keeping.begin(self.refused.append)
        assert not self.keeping.advance()

    def park(self, job: str, *, restartable: bool = True, later: bool = False) -> None:
        gang = self.core.jobs[job]
        said = suspended(gang.epoch, gang.asked.stop_at)
        changed: Any = {"restartable": restartable, "restartable_later": later}
        self.driver.say(job, msgspec.structs.replace(said, **changed))
        self.keeping.advance()

    def end(self) -> None:
        """Let all processes end that were told to."""
        for name in self.kills:
            job = self.core.jobs[name]
            attempt = job.attempt
            for rank in job.there():
                self.driver.do(RankGone(name, rank.number, attempt=attempt))
            self.driver.do(Exited(name, -9, attempt=attempt))
        self.keeping.advance()
        self.move()

    def move(self) -> None:
        """Wait until the snapshots are moved, if they are to be by now."""
        if self.keeping._storing is not None and self.shelf.may_end.is_set():
            self.keeping._storing.join(PATIENCE_S)

    @property
    def go_on(self) -> bool:
        """True if no job is being kept."""
        return not any(job.keep for job in self.core.jobs.values())


@pytest.fixture
def house() -> Iterator[House]:
    with closing() as found:
        yield found


@contextmanager
def closing() -> Iterator[House]:
    found = House()
    found.driver.running_pair()
    found.driver.progress("a", 10)
    try:
        yield found
    finally:
        found.keeping.close()
        assert not [one for one in threading.enumerate() if one.name == "gpuslice-keep"]


def test_all_are_kept_once_they_are_parked_ended_and_stored(house: House) -> None:
    house.begin()
    assert not house.kills
    house.park("a")
    assert house.kills == ["a", "b"]
    assert not house.keeping.advance(), "processes are there"
    house.end()
    assert house.keeping.advance()
    assert house.shelf.kept == {"a": 1}, "b has never trained"
    (noted,) = house.shelf.noted
    assert [(one.spec.id, one.steps, one.keepers) for one in noted.jobs] == [("a", 11, 1), ("b", 0, 0)]
    assert not house.refused


def test_what_changes_before_the_scheduler_leaves_is_written_down_again(house: House) -> None:
    house.begin()
    house.park("a")
    house.end()
    assert house.keeping.advance()
    assert house.keeping.advance()
    assert len(house.shelf.noted) == 1, "nothing has changed"
    house.driver.wake(5.0)
    house.driver.do(Cancelled("a", "by its owner"))
    assert house.keeping.advance()
    assert [[one.spec.id for one in noted.jobs] for noted in house.shelf.noted] == [["a", "b"], ["b"]]


def test_who_cannot_go_on_in_another_process_is_named_and_all_go_on(house: House) -> None:
    house.begin()
    house.park("a", restartable=False)
    (error,) = house.refused
    assert error.message.startswith("1 job cannot be kept: a (no other process can go on from its snapshot")
    assert "all jobs go on" in error.remedy
    assert house.go_on
    assert not house.kills
    assert house.core.jobs["a"].lease, "it is on its device again"


def test_who_can_be_kept_at_a_later_boundary_trains_on_to_it(house: House) -> None:
    house.begin()
    house.park("a", restartable=False, later=True)
    assert house.asked[-1] == (None, "a")
    job = house.core.jobs["a"]
    parked_at = job.ranks[0].boundary
    house.driver.resumed("a")
    assert not house.keeping.advance()
    assert job.keep is None, "it has not trained on"
    house.driver.progress("a", parked_at + 1)
    house.keeping.advance()
    assert house.asked[-1] == (Keep.PARK, "a")
    house.park("a")
    assert house.kills == ["a", "b"]


def test_who_can_never_be_kept_although_it_says_later_is_named(house: House) -> None:
    house.begin()
    job = house.core.jobs["a"]
    while not house.refused:
        house.park("a", restartable=False, later=True)
        if not house.refused:
            house.driver.resumed("a")
            house.driver.progress("a", job.ranks[0].boundary + 100)
            house.keeping.advance()
    assert "at none of 6 boundaries" in house.refused[0].message
    assert house.go_on


def test_a_job_that_reaches_no_boundary_is_named(house: House) -> None:
    house.begin()
    house.driver.wake(1000.0)
    house.keeping.advance()
    (error,) = house.refused
    assert "a (it has reached no boundary in time)" in error.message
    assert house.go_on


def test_without_room_nothing_is_ended(house: House) -> None:
    house.shelf.no_room = EnvironmentUnusableError("no room", "make some")
    house.begin()
    house.park("a")
    assert house.refused == [house.shelf.no_room]
    assert not house.kills
    assert house.go_on


@pytest.mark.parametrize("broken", [EnvironmentUnusableError("odd", "make room"), ValueError("odd")])
def test_if_snapshots_cannot_be_moved_the_jobs_are_started_again(house: House, broken: Exception) -> None:
    house.shelf.broken = broken
    house.begin()
    house.park("a")
    house.end()
    assert not house.keeping.advance()
    (error,) = house.refused
    assert "odd" in error.message
    assert house.go_on
    assert all(job.command.launched for job in house.core.jobs.values())
    house.shelf.broken = None
    house.kills.clear()
    house.begin()
    assert house.kills == ["a", "b"], "it can be tried again"


def test_if_the_file_cannot_be_written_the_jobs_are_started_again(house: House) -> None:
    house.shelf.unwritable = EnvironmentUnusableError("no room", "make some")
    house.begin()
    house.park("a")
    house.end()
    assert not house.keeping.advance()
    assert house.refused == [house.shelf.unwritable]
    assert all(job.command.launched for job in house.core.jobs.values())


def test_it_can_be_called_off_while_jobs_park(house: House) -> None:
    house.begin()
    assert house.keeping.call_off()
    (error,) = house.refused
    assert "called off" in error.message
    assert house.go_on
    assert not house.kills
    assert not house.keeping.call_off()


def test_it_can_be_called_off_while_processes_end(house: House) -> None:
    house.begin()
    house.park("a")
    assert house.kills
    assert house.keeping.call_off()
    house.end()
    assert house.go_on
    assert all(job.command.launched and not job.failures for job in house.core.jobs.values())


def test_it_can_be_called_off_while_snapshots_are_moved(house: House) -> None:
    house.begin()
    house.shelf.may_end.clear()
    house.park("a")
    house.end()
    assert house.keeping.call_off()
    assert not house.keeping.advance()
    assert not house.refused
    house.shelf.may_end.set()
    house.move()
    assert not house.keeping.advance()
    assert not house.shelf.noted
    assert len(house.refused) == 1
    assert house.go_on
    assert all(job.command.launched and not job.failures for job in house.core.jobs.values())


def test_what_another_scheduler_had_begun_to_keep_is_scheduled_again(house: House) -> None:
    house.begin()
    house.park("a")
    release(cast(Scheduler, house), house.shelf)
    assert house.go_on
    assert house.core.jobs["a"].state is not JobState.FAILED
    before = list(house.asked)
    release(cast(Scheduler, house), house.shelf)
    assert house.asked == before, "nothing was kept"
