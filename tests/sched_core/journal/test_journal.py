"""The journal: what was written comes back, a replayed core is the same, faults are named.

``GPUSLICE_FLIPS`` says how many bits are flipped: 1,500 by ``./x soak flips``.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from gpuslice import wire
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.journal.audit import audit
from gpuslice.sched_core.journal.head import Head, HeadFile, link, path_of
from gpuslice.sched_core.journal.heartbeats import path_of as heartbeats_of
from gpuslice.sched_core.journal.journal import FILE, Journal, JournalDamagedError, JournalError
from gpuslice.sched_core.journal.repair import salvage
from gpuslice.sched_core.lifecycle.events import Event, Held, Noted, Reported, Woken
from gpuslice.sched_core.policies.rr import RoundRobin

from ..driver import QUANTUM_S, Driver, devices, picture

FLIPS = int(os.environ.get("GPUSLICE_FLIPS", "150"))


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


def test_heartbeats_that_people_saw_are_there_after_a_kill(tmp_path: Path) -> None:
    killed = Journal(tmp_path / "j")
    killed.append(Woken(), 1.0, quiet=True)
    killed.append(heartbeat(3), 2.0, quiet=True)
    killed.save_heartbeats()
    killed.append(heartbeat(4), 3.0, quiet=True)
    killed.append(heartbeat(5, 1), 4.0, quiet=True)
    killed.save_heartbeats()
    killed.append(heartbeat(6), 5.0, quiet=True)  # nobody saw it
    with Journal(tmp_path / "j") as journal:
        assert list(journal.replay()) == [(Woken(), 1.0), (heartbeat(4), 3.0), (heartbeat(5, 1), 4.0)]
    with Journal(tmp_path / "j") as journal:  # they were of another end
        assert len(list(journal.replay())) == 3


def test_heartbeats_are_left_out_if_their_file_is_damaged(tmp_path: Path) -> None:
    killed = Journal(tmp_path / "j")
    killed.append(heartbeat(3), 2.0, quiet=True)
    killed.save_heartbeats()
    file = heartbeats_of(tmp_path / "j")
    file.write_bytes(file.read_bytes()[:-1])
    with Journal(tmp_path / "j") as journal:
        assert list(journal.replay()) == []


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


def test_a_heartbeat_that_tells_of_more_than_the_next_one_is_written(tmp_path: Path) -> None:
    beats = [heartbeat(5), heartbeat(2), heartbeat(5), heartbeat(6)]
    with Journal(tmp_path / "j") as journal:
        for number, beat in enumerate(beats):
            journal.append(beat, float(number), quiet=True)
        journal.append(Woken(), 5.0, quiet=True)
    with Journal(tmp_path / "j") as journal:
        assert [event for event, _ in journal.replay()] == [heartbeat(5), heartbeat(6), Woken()]


def test_a_heartbeat_is_no_repetition_if_another_one_came_between(tmp_path: Path) -> None:
    calm, stuck = heartbeat(5), Reported("a", 0, wire.Progress(epoch=1, boundary=5, step=5, stuck="line 3"))
    with Journal(tmp_path / "j") as journal:
        for event in (calm, Woken(), stuck, calm, Woken()):
            journal.append(event, 0.0, quiet=True)
    with Journal(tmp_path / "j") as journal:
        assert [event for event, _ in journal.replay()] == [calm, Woken(), calm, Woken()]


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
        chain = link(journal._end.chain, 1, 0.0, b"\xc1")
        row = (1, 0.0, b"\xc1", chain)
        journal._database.execute("INSERT INTO events (number, at_s, event, chain) VALUES (?, ?, ?, ?)", row)
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


SETUP = b"what it is the journal of" * 20
OLD = """
CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE events (number INTEGER PRIMARY KEY, at_s REAL NOT NULL, event BLOB NOT NULL);
"""


def note(number: int) -> Event:
    return Noted("x" * (number % 50), f"job{number}", {"a": number})


@pytest.fixture
def left_behind(tmp_path: Path) -> Path:
    """The files of a journal of 120 events whose scheduler was killed: some in SQLite's log, some not."""
    writing = tmp_path / "writing"
    writing.mkdir()
    with Journal(writing / FILE) as journal:
        journal.introduce(SETUP)
        for number in range(120):
            journal.append(note(number), float(number), quiet=False)
            if number == 70:
                journal._fresh = 10**6
                journal.tidy_up()
        shutil.copytree(writing, tmp_path / "left")
    return tmp_path / "left"


def is_whole(path: Path) -> bool:
    with Journal(path) as journal:
        found = [event for event, _ in journal.replay()]
        return found == [note(number) for number in range(120)] and journal.about() == SETUP


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def check_flips(left: Path, tries: int, seed: int) -> set[str]:
    """Flip bits, one at a time; where that was noticed."""
    chance, noticed = random.Random(seed), set()
    for _ in range(tries):
        name = chance.choice([FILE, f"{FILE}-wal", path_of(left / FILE).name])
        copy = left.parent / "copy"
        shutil.copytree(left, copy)
        bit = chance.randrange((copy / name).stat().st_size * 8)
        flip(copy / name, bit)
        before = {path.name: path.read_bytes() for path in copy.iterdir() if not path.name.endswith("-shm")}
        try:
            assert is_whole(copy / FILE), (name, bit)
        except JournalError:
            noticed.add(name)
            for found, data in before.items():
                assert (copy / found).read_bytes() == data, "nothing is changed before somebody decides"
        shutil.rmtree(copy)
    return noticed


def test_a_flipped_bit_is_harmless_or_noticed(left_behind: Path) -> None:
    assert is_whole(left_behind.parent / "writing" / FILE)
    assert len(check_flips(left_behind, FLIPS, seed=1)) == 3


def test_a_log_that_is_gone_is_noticed_and_what_is_whole_can_be_saved(left_behind: Path) -> None:
    (left_behind / f"{FILE}-wal").unlink()
    with pytest.raises(JournalDamagedError, match="71 events are whole, at least 49 are missing") as caught:
        Journal(left_behind / FILE)
    assert "--accept-loss" in caught.value.remedy
    assert caught.value.exit_code == 4
    salvage(left_behind / FILE, audit(left_behind / FILE), left_behind / "new.sqlite")
    with Journal(left_behind / "new.sqlite") as journal:
        assert [event for event, _ in journal.replay()] == [note(number) for number in range(71)]
        assert journal.about() == SETUP
        journal.append(Woken(), 200.0, quiet=False)
    with Journal(left_behind / "new.sqlite") as journal:
        assert len(list(journal.replay())) == 72


@pytest.mark.parametrize("gone", [FILE, path_of(Path(FILE)).name])
def test_a_journal_of_which_a_file_is_gone_is_not_taken_for_a_new_one(left_behind: Path, gone: str) -> None:
    for path in left_behind.glob(f"{gone}*"):
        path.unlink()
    with pytest.raises(JournalDamagedError, match="cannot be used"):
        Journal(left_behind / FILE)


def test_an_end_that_is_empty_is_gone(left_behind: Path) -> None:
    path_of(left_behind / FILE).write_bytes(b"")
    with pytest.raises(JournalDamagedError, match="the file that says where it ends is gone"):
        Journal(left_behind / FILE)


def test_an_event_that_was_written_before_its_number_was_noted_counts(left_behind: Path) -> None:
    with Journal(left_behind / FILE) as journal:
        before = journal._end
        journal.append(Woken(), 500.0, quiet=False)
    head = HeadFile(path_of(left_behind / FILE))
    head.write(before)
    head.close()
    with Journal(left_behind / FILE) as journal:
        assert len(list(journal.replay())) == 121


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_journal_without_checksums_gets_them(tmp_path: Path, interrupted: bool) -> None:
    path = tmp_path / FILE
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(OLD)
    with Journal(tmp_path / "new.sqlite") as journal:
        for number in range(20):
            journal.append(note(number), float(number), quiet=False)
        rows = journal._database.execute("SELECT number, at_s, event FROM events").fetchall()
        end = Head(20, journal._end.chain, introduced=True)
    with database:
        database.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
        database.execute("INSERT INTO about VALUES ('setup', ?)", (SETUP,))
    database.close()
    with Journal(path, read_only=True) as journal:
        assert [event for event, _ in journal.replay()] == [note(number) for number in range(20)]
    if interrupted:
        head = HeadFile(path_of(path))
        head.write(end)
        head.close()
    with Journal(path) as journal:
        assert [event for event, _ in journal.replay()] == [note(number) for number in range(20)]
        assert (journal.about(), journal._end) == (SETUP, end)
        journal.append(note(20), 20.0, quiet=False)
    found = audit(path)
    assert (found.problem, found.chained, found.head.number) == ("", True, 21)
    flip(path_of(path), 8 * 30)
    with pytest.raises(JournalDamagedError):
        Journal(path)


@pytest.mark.parametrize("introduced", [False, True])
def test_a_journal_without_checksums_and_events_can_be_written(tmp_path: Path, introduced: bool) -> None:
    path = tmp_path / FILE
    database = sqlite3.connect(path)
    database.executescript(OLD)
    if introduced:
        with database:
            database.execute("INSERT INTO about VALUES ('setup', ?)", (SETUP,))
    database.close()
    with Journal(path) as journal:
        assert journal.about() == (SETUP if introduced else None)
        journal.append(note(0), 0.0, quiet=False)
    with Journal(path) as journal:
        assert [event for event, _ in journal.replay()] == [note(0)]


@pytest.mark.parametrize("with_tables", [False, True])
def test_a_journal_whose_scheduler_was_killed_as_it_was_made_is_a_new_one(
    tmp_path: Path, with_tables: bool
) -> None:
    path = tmp_path / FILE
    if with_tables:
        Journal(path).close()
    path_of(path).write_bytes(b"")
    with Journal(path) as journal:
        journal.append(note(0), 0.0, quiet=False)
    with Journal(path) as journal:
        assert [event for event, _ in journal.replay()] == [note(0)]


def test_whoever_looks_beside_notices_too(left_behind: Path) -> None:
    with Journal(left_behind / FILE) as journal:
        journal._database.execute("UPDATE events SET event = x'00' WHERE number = 7")
        with pytest.raises(JournalError, match="event 7 is not what was written"):
            journal.after(5, 10)
