"""The journal: what was written comes back, a replayed core is the same, faults are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice import wire
from gpuslice.sched_core.core import Core
from gpuslice.sched_core.events import Held, Reported, Woken
from gpuslice.sched_core.journal import Journal, JournalError
from gpuslice.sched_core.policies.rr import RoundRobin

from .driver import QUANTUM_S, Driver, devices, picture


def heartbeat(boundary: int, rank: int = 0) -> Reported:
    return Reported("a", rank, wire.Progress(epoch=1, boundary=boundary, step=boundary))


def test_a_replayed_core_is_the_same(tmp_path: Path) -> None:
    driver = Driver(3)
    driver.running_gang()
    driver.wake()
    driver.overshot("g", 11, 1)
    driver.parked("g", 12, 0)
    driver.do(Held("h"))
    with Journal(tmp_path / "j") as journal:
        for event, now in driver.journal:
            journal.append(event, now, quiet=False)
    core = Core(devices(3), RoundRobin(quantum_s=QUANTUM_S))
    with Journal(tmp_path / "j") as journal:
        for event, now in journal.replay():
            core.handle(event, now)
    assert picture(core) == picture(driver.core)


def test_heartbeats_are_written_with_what_follows_and_only_the_newest(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for number in range(5):
            journal.append(heartbeat(number), float(number), quiet=True)
            journal.append(heartbeat(number, 1), float(number), quiet=True)
        journal.append(Woken(), 5.0, quiet=True)
        journal.append(heartbeat(4, 1), 6.0, quiet=True)
        journal.append(heartbeat(6), 6.0, quiet=True)
        journal.append(heartbeat(7), 7.0, quiet=False)
        journal.append(heartbeat(8), 8.0, quiet=True)
        beside = Journal(tmp_path / "j", read_only=True)
        assert [event for event, _ in beside.replay()][-1] == heartbeat(7)
        beside.close()
    with Journal(tmp_path / "j") as journal:
        assert [event for event, _ in journal.replay()] == [
            heartbeat(4),
            heartbeat(4, 1),
            Woken(),
            heartbeat(6),
            heartbeat(7),
            heartbeat(8),
        ]


def test_it_remembers_what_it_is_the_journal_of(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        assert journal.about() is None
        journal.introduce(b"x")
    with Journal(tmp_path / "j") as journal:
        assert journal.about() == b"x"


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"not a database" * 100)
    with pytest.raises(JournalError, match="cannot be used"):
        Journal(tmp_path / "j")


def test_bytes_that_are_no_event_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal._database.execute("INSERT INTO events (at_s, event) VALUES (0.0, x'c1')")
        with pytest.raises(JournalError, match="cannot be used"):
            list(journal.replay())


def test_tidying_up_moves_what_is_much_and_loses_nothing(tmp_path: Path) -> None:
    events = [heartbeat(number) for number in range(600)]
    with Journal(tmp_path / "j") as journal:
        for number, event in enumerate(events[:400]):
            journal.append(event, float(number), quiet=False)
        size = (tmp_path / "j").stat().st_size
        journal.tidy_up()
        assert (tmp_path / "j").stat().st_size == size, "not worth it yet"
        for number, event in enumerate(events[400:]):
            journal.append(event, float(number), quiet=False)
        journal.tidy_up()
        assert (tmp_path / "j").stat().st_size > size
        assert [event for event, _ in journal.replay()] == events
