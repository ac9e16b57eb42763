"""The journal's schema, the migration of an old journal, and the repair of a damaged one."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from .audit import Audit, whole
from .head import START, Head, HeadFile, checksum, link, path_of
from .wall_clock import CLOCK_SCHEMA, copy_notes

SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events
    (number INTEGER PRIMARY KEY, at_s REAL NOT NULL, event BLOB NOT NULL, chain BLOB NOT NULL DEFAULT x'');
"""
SCHEMA += CLOCK_SCHEMA
INSERT = "INSERT INTO events (number, at_s, event, chain) VALUES (?, ?, ?, ?)"


def migrate(database: sqlite3.Connection) -> None:
    """Add checksums to the events of a journal that has none: to all or to none."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("ALTER TABLE events ADD COLUMN chain BLOB NOT NULL DEFAULT x''")
        chain, sums = START, []
        for number, at_s, event in database.execute("SELECT number, at_s, event FROM events ORDER BY number"):
            chain = link(chain, number, at_s, event)
            sums.append((chain, number))
        database.executemany("UPDATE events SET chain = ? WHERE number = ?", sums)
        for (setup,) in database.execute("SELECT value FROM about WHERE name = 'setup'").fetchall():
            database.execute("INSERT OR REPLACE INTO about VALUES ('setup_sum', ?)", (checksum(setup),))


def salvage(damaged: Path, found: Audit, path: Path) -> None:
    """Make a new journal at ``path`` from the events at ``damaged`` that ``found`` calls intact."""
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.executescript(SCHEMA)
        with database:
            database.execute("BEGIN")
            chain = START
            for number, at_s, event in whole(damaged, found):
                chain = link(chain, number, at_s, event)
                database.execute(INSERT, (number, at_s, event, chain))
            if found.setup is not None:
                rows = [("setup", found.setup), ("setup_sum", checksum(found.setup))]
                database.executemany("INSERT INTO about VALUES (?, ?)", rows)
            copy_notes(damaged, database)
    finally:
        database.close()
    head = HeadFile(path_of(path))
    head.write(Head(found.head.number, chain, found.setup is not None))
    head.sync()
    head.close()
