"""The Unix time of moments of the scheduler's clock: recorded in the journal when the two drift apart.

The scheduler's clock is monotonic. It stands still while the machine sleeps or is off, and cannot be set. So
a pair of times records both clocks, and the next pair follows when their difference has changed. The notes
are for people who read the journal: no decision depends on them, and no checksum covers them.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path

CLOCK_SCHEMA = "CREATE TABLE IF NOT EXISTS clock (at_s REAL NOT NULL, unix_s REAL NOT NULL);\n"
_INSERT = "INSERT INTO clock VALUES (?, ?)"
#: Drift between the two clocks that causes a new note.
_DRIFT_S = 0.1


class WallClock:
    """A converter from the scheduler's clock to Unix time.

    Parameters
    ----------
    noted
        What both clocks showed, the oldest first.
    """

    def __init__(self, noted: Sequence[tuple[float, float]] = ()) -> None:
        self._noted = list(noted)

    def unix_s(self, at_s: float) -> float | None:
        """Return the Unix time at ``at_s``. Return None if nothing was noted until then."""
        number = bisect_right(self._noted, at_s, key=lambda pair: pair[0])
        if not number:
            return None
        then_s, unix_s = self._noted[number - 1]
        return unix_s + at_s - then_s

    def note(self, database: sqlite3.Connection, at_s: float, unix_s: float) -> None:
        """Record both clocks' times, unless an earlier note gives the same difference."""
        known_s = self.unix_s(at_s)
        if known_s is None or abs(known_s - unix_s) > _DRIFT_S:
            database.execute(_INSERT, (at_s, unix_s))
            self._noted.append((at_s, unix_s))


def read_notes(database: sqlite3.Connection) -> WallClock:
    """Return the clock of a journal. A journal of an earlier version has no notes."""
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'clock'").fetchone():
        return WallClock()
    rows = database.execute("SELECT at_s, unix_s FROM clock ORDER BY at_s, rowid").fetchall()
    return WallClock([row for row in rows if all(isinstance(value, float) for value in row)])


def copy_notes(damaged: Path, database: sqlite3.Connection) -> None:
    """Copy the notes of the journal at ``damaged`` as far as they can be read."""
    notes: Iterable[tuple[float, float]] = ()
    # Events without their local time are better than none.
    with suppress(sqlite3.Error):
        source = sqlite3.connect(f"{damaged.absolute().as_uri()}?mode=ro", uri=True)
        with closing(source):
            notes = read_notes(source)._noted
    database.executemany(_INSERT, notes)
