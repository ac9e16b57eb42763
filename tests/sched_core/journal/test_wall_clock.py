"""The journal knows at which Unix time its events happened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gpuslice.sched_core.journal.audit import audit
from gpuslice.sched_core.journal.event_listing import history
from gpuslice.sched_core.journal.journal import FILE, Journal
from gpuslice.sched_core.journal.repair import salvage
from gpuslice.sched_core.lifecycle.events import Noted


def append(path: Path, *moments: tuple[float, float]) -> None:
    """Add events at these times of the scheduler's clock, while the other one shows these."""
    shown = iter(unix_s for _, unix_s in moments)
    with Journal(path, unix_s=lambda: next(shown)) as journal:
        for at_s, _ in moments:
            journal.append(Noted("message", details={}), at_s, quiet=False)


def times(path: Path) -> list[float | None]:
    with Journal(path, read_only=True) as journal:
        return [event.unix_s for event in history(journal, 0).events]


def test_each_event_has_the_time_at_which_it_happened_whatever_became_of_the_clocks(tmp_path: Path) -> None:
    path = tmp_path / FILE
    append(path, (10.0, 1000.0), (11.0, 1001.0), (12.0, 1500.0))  # the machine slept
    append(path, (12.0, 9000.0), (13.0, 9001.05), (14.0, 8000.0))  # started anew, drifted, set back
    assert times(path) == [1000.0, 1001.0, pytest.approx(9000.0), 9000.0, 9001.0, 8000.0]
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM clock").fetchone() == (4,)


def test_an_older_journal_has_no_times_until_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / FILE
    append(path, (10.0, 1000.0))
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE clock")
    assert times(path) == [None]
    append(path, (11.0, 2000.0))
    assert times(path) == [None, 2000.0]


def test_times_are_kept_of_what_is_whole_of_a_damaged_journal(tmp_path: Path) -> None:
    path = tmp_path / FILE
    append(path, (10.0, 1000.0), (11.0, 1001.0))
    with sqlite3.connect(path) as database:
        database.execute("UPDATE events SET event = x'00' WHERE number = 2")
        database.execute("INSERT INTO clock VALUES ('x', 'y')")
    salvage(path, audit(path), tmp_path / "fresh.sqlite")
    assert times(tmp_path / "fresh.sqlite") == [1000.0]
