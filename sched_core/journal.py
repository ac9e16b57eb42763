"""Everything that happened to a core, in the order in which it happened: its memory across restarts.

An event is written after the core has taken it and before any command that follows from it leaves. So what
the world was told is always in the journal, and ``core.handle`` over the journal gives the same core again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gpuslice.errors import GpusliceError
from gpuslice.types import explain, shortened
from gpuslice.wire import NOT_A_VALUE, Progress

from .events import Event, Noted, Reported, decode

FILE = "journal.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, at_s REAL NOT NULL, event BLOB NOT NULL);
"""
#: So many entries are worth a checkpoint of SQLite's log.
_MANY = 500
_INSERT = "INSERT INTO events (at_s, event) VALUES (?, ?)"
_encoder = msgspec.msgpack.Encoder()
#: What is noted in the place of an event whose values are none that an event may have, with the reason.
UNREADABLE = "unreadable"
#: So many entries are read at a time.
_PAGE = 500
_REASON_CHARACTERS = 1000


class JournalError(GpusliceError):
    """The journal cannot be read or written; the scheduler cannot go on, its jobs can."""

    exit_code = 3


class Journal:
    """A journal in SQLite; a context manager.

    Survives the end of the process at any moment, as the machine's does all but the last moments.

    Parameters
    ----------
    path
        The file; made if need be.
    read_only
        Look at a journal beside the scheduler that writes it.

    Raises
    ------
    JournalError
        From every method, if the file cannot be used, for instance because the disk is full.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        #: The newest heartbeat of each rank, oldest first, since anything else was written.
        self._heartbeats: dict[tuple[str, int], tuple[float, Event]] = {}
        #: The last heartbeat of each rank that was written.
        self._written: dict[tuple[str, int], Event] = {}
        #: Entries since the last checkpoint.
        self._fresh = 0
        try:
            mode = "ro" if read_only else "rwc"
            uri = f"{path.absolute().as_uri()}?mode={mode}"
            self._database = sqlite3.connect(uri, isolation_level=None, uri=True)
            if read_only:
                return
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("PRAGMA wal_autocheckpoint = 0")  # see tidy_up
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left to write and close the file."""
        try:
            self.flush()
        finally:
            self._database.close()

    def about(self) -> bytes | None:
        """What ``introduce`` wrote, if anything."""
        try:
            found = self._database.execute("SELECT value FROM about WHERE name = 'setup'").fetchone()
        except sqlite3.Error as error:
            raise self._broken(error) from error
        return None if found is None else found[0]

    def introduce(self, setup: bytes) -> None:
        """Write down what core this is the journal of."""
        try:
            self._database.execute("INSERT OR REPLACE INTO about VALUES ('setup', ?)", (setup,))
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def append(self, event: Event, now: float, *, quiet: bool) -> None:
        """Write ``event`` down; it is safe when this returns, unless it is a quiet heartbeat.

        Parameters
        ----------
        quiet
            Whether no command followed from it. A heartbeat from which nothing followed is written together
            with the next event that is more than that, and not at all if it repeats the last one or if the
            same rank's next one comes first: the core that has seen the second knows all of the first.
        """
        if quiet and isinstance(event, Reported) and isinstance(event.message, Progress):
            rank = event.job, event.rank
            if self._written.get(rank) != event:
                self._heartbeats.pop(rank, None)
                self._heartbeats[rank] = (now, event)
            return
        self._insert([*self._heartbeats.values(), (now, event)])
        self._written |= {rank: beat for rank, (_, beat) in self._heartbeats.items()}
        self._heartbeats.clear()

    def tidy_up(self) -> None:
        """Move what was written from SQLite's log to its proper place, if it is much.

        That waits for the disk, which an ``append`` does not: to be called when nobody else waits.
        """
        if self._fresh < _MANY:
            return
        self._fresh = 0
        try:
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def replay(self) -> Iterator[tuple[Event, float]]:
        """All events and when they happened, the oldest first."""
        for _, at_s, event in self.entries(0):
            yield event, at_s

    def entries(self, number: int) -> Iterator[tuple[int, float, Event]]:
        """All events that follow event ``number``, with number and time, the oldest first."""
        while page := self.after(number, _PAGE):
            yield from page
            number = page[-1][0]

    def notes(self, what: str) -> list[Noted]:
        """All ``Noted`` of ``what``."""
        query = "SELECT number, event FROM events WHERE instr(event, ?) ORDER BY number"
        try:
            found = [self._event(*row) for row in self._database.execute(query, (what.encode(),))]
        except sqlite3.Error as error:
            raise self._broken(error) from error
        return [event for event in found if isinstance(event, Noted) and event.what == what]

    def flush(self) -> None:
        """Write down heartbeats that were put off."""
        if self._heartbeats:
            self._insert(list(self._heartbeats.values()))
            self._written |= {rank: beat for rank, (_, beat) in self._heartbeats.items()}
            self._heartbeats.clear()

    def after(self, number: int, most: int) -> list[tuple[int, float, Event]]:
        """At most ``most`` events that follow event ``number``, with number and time."""
        query = "SELECT number, at_s, event FROM events WHERE number > ? ORDER BY number LIMIT ?"
        try:
            found = self._database.execute(query, (number, most)).fetchall()
        except sqlite3.Error as error:
            raise self._broken(error) from error
        return [(found_number, at_s, self._event(found_number, event)) for found_number, at_s, event in found]

    def _event(self, number: int, written: bytes) -> Event:
        """An entry's event; a note in its place if that is whole, but has a value that no event may have."""
        try:
            return decode(written)
        except msgspec.ValidationError as error:
            reason = shortened(explain(error), _REASON_CHARACTERS)
            return Noted(UNREADABLE, details={"number": number, "reason": reason})
        except NOT_A_VALUE as error:
            raise self._broken(error) from error

    def _insert(self, entries: list[tuple[float, Event]]) -> None:
        """Write ``entries``, all or none."""
        rows = [(at_s, _encoder.encode(event)) for at_s, event in entries]
        self._fresh += len(rows)
        try:
            if len(rows) == 1:
                self._database.execute(_INSERT, rows[0])  # a transaction by itself
                return
            with self._database:
                self._database.execute("BEGIN")
                self._database.executemany(_INSERT, rows)
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> JournalError:
        return JournalError(
            f"the journal {self.path} cannot be used: {error}",
            "make room or mend it, then `gpuslice up` goes on; the jobs run on meanwhile",
        )
