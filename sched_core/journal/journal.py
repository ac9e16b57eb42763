"""The journal of a core: every event in order, which restores the core after a restart.

An event is written after the core has accepted it, and before any command that follows from it is sent. So
the journal contains everything on which commands were based, and ``core.handle`` over the journal gives the
same core again. Every event carries a checksum of itself and all events before it, and the journal's end is
recorded beside it (``head``). Damage and missing events are noticed when the journal is opened (``audit``).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpuslice.errors import GpusliceError
from gpuslice.sched_core.journal import heartbeats
from gpuslice.sched_core.lifecycle.events import Event, Noted, Reported, decode
from gpuslice.types import explain, shortened
from gpuslice.wire import NOT_A_VALUE, Progress

from .audit import Audit, audit
from .head import START, Head, HeadFile, checksum, link, path_of
from .repair import INSERT, SCHEMA, migrate
from .wall_clock import WallClock, read_notes

FILE = "journal.sqlite"
#: Number of entries that are worth a checkpoint of SQLite's log.
_MANY = 500
_encoder = msgspec.msgpack.Encoder()
#: Name of the note that replaces an event with a value that no event may have; it has the reason.
UNREADABLE = "unreadable"
#: Number of entries read at a time.
_PAGE = 500
_REASON_CHARACTERS = 1000


class JournalError(GpusliceError):
    """The journal cannot be read or written. The scheduler cannot go on; its jobs can."""

    exit_code = 3


class JournalDamagedError(JournalError):
    """A part of the journal was changed or is missing. Nothing was modified.

    Attributes
    ----------
    found
        What there still is.
    """

    exit_code = 4

    def __init__(self, path: Path, found: Audit, more: str = "") -> None:
        kept = f"{found.head.number} events are whole"
        missing = f", at least {found.missing} are missing" if found.missing else ""
        super().__init__(
            f"the journal {path} cannot be used, it is damaged: {found.problem}; {kept}{missing}{more}",
            "`gpuslice up --accept-loss` goes on with what is whole and keeps the rest under past-N; "
            "or bring the file back from a copy",
        )
        self.path, self.found = path, found


class Journal:
    """A journal in SQLite; a context manager.

    It survives the end of the process at any moment. After the end of the machine only the last moments may
    be missing.

    Parameters
    ----------
    path
        The file; made if need be.
    read_only
        Look at a journal beside the scheduler that writes it.
    unix_s
        Returns the Unix time.

    Raises
    ------
    JournalError
        From every method, if the file cannot be used, for instance because the disk is full.
    JournalDamagedError
        If something of it is not what was written, or is missing.
    """

    def __init__(
        self, path: Path, *, read_only: bool = False, unix_s: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self._unix_s = unix_s
        #: Newest heartbeat of each rank, oldest first, since the last write of another event.
        self._heartbeats: dict[tuple[str, int], tuple[float, Reported]] = {}
        #: What ``save_heartbeats`` has kept.
        self._saved: dict[tuple[str, int], tuple[float, Reported]] = {}
        #: Last written heartbeat of each rank.
        self._written: dict[tuple[str, int], Event] = {}
        #: Entries since the last checkpoint.
        self._fresh = 0
        self._end = Head()
        self._head: HeadFile | None = None
        with self._told():
            found = None if read_only else self._audit()
            mode = "ro" if read_only else "rwc"
            uri = f"{path.absolute().as_uri()}?mode={mode}"
            self._database = sqlite3.connect(uri, isolation_level=None, uri=True)
            if found is not None:
                self._prepare(found)
            self._chained = "chain" in _columns(self._database)
            self._wall_clock = read_notes(self._database)
        self.flush()

    def _audit(self) -> Audit:
        found = audit(self.path)
        if found.problem:
            raise JournalDamagedError(self.path, found)
        return found

    def _prepare(self, found: Audit) -> None:
        """Prepare to write after the intact events of ``found``."""
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("PRAGMA wal_autocheckpoint = 0")  # see tidy_up
        self._head, self._end = HeadFile(path_of(self.path)), found.head
        if (columns := _columns(self._database)) and "chain" not in columns:
            # Known before the checksums are there: if this is cut short, it is done again.
            self._head.write(self._end)
            self._head.sync()
            migrate(self._database)
        self._database.executescript(SCHEMA)
        self._head.write(self._end)
        self._head.sync()
        for at_s, beat in heartbeats.load(heartbeats.path_of(self.path), self._end.chain):
            self._heartbeats[beat.job, beat.rank] = (at_s, beat)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is still to be written, and close the file."""
        try:
            self.flush()
        finally:
            self._database.close()
            if self._head is not None:
                self._head.close()

    def about(self) -> bytes | None:
        """Return what ``introduce`` wrote, or None."""
        with self._told():
            found = self._database.execute("SELECT value FROM about WHERE name = 'setup'").fetchone()
        return None if found is None else found[0]

    def introduce(self, setup: bytes) -> None:
        """Write the description of the journal's core."""
        with self._told(), self._database:
            self._database.execute("BEGIN")
            rows = [("setup", setup), ("setup_sum", checksum(setup))]
            self._database.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)
        self._note(Head(self._end.number, self._end.chain, introduced=True))

    def append(self, event: Event, now: float, *, quiet: bool) -> None:
        """Write ``event``. It is safe when this returns, unless it is a quiet heartbeat.

        Parameters
        ----------
        quiet
            True if no command followed from it. A heartbeat from which nothing followed is written together
            with the next event that is more than that, and not at all if it repeats the last one or if the
            same rank's next one comes first: the core that has seen the second knows all of the first, unless
            a count has gone back.
        """
        if quiet and isinstance(event, Reported) and isinstance(event.message, Progress):
            rank = event.job, event.rank
            if rank not in self._heartbeats and self._written.get(rank) == event:
                return
            if rank in self._heartbeats and _goes_back(self._heartbeats[rank][1], event.message):
                self.flush()
            self._heartbeats.pop(rank, None)
            self._heartbeats[rank] = (now, event)
            return
        with self._told():
            self._wall_clock.note(self._database, now, self._unix_s())
        self._insert_after_heartbeats((now, event))

    def wall_clock(self) -> WallClock:
        """Return what converts the events' times to Unix time, as the file has it by now."""
        with self._told():
            return read_notes(self._database)

    def tidy_up(self) -> None:
        """Move entries from SQLite's log into the database, if there are many.

        This waits for the disk, which ``append`` does not. Call it when no other work is waiting.
        """
        if self._fresh < _MANY:
            return
        self._fresh = 0
        with self._told():
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            if self._head is not None:
                self._head.sync()

    def replay(self) -> Iterator[tuple[Event, float]]:
        """Yield all events with their times, oldest first."""
        for _, at_s, event in self.entries(0):
            yield event, at_s

    def entries(self, number: int) -> Iterator[tuple[int, float, Event]]:
        """Yield all events after event ``number``, with number and time, oldest first."""
        while page := self.after(number, _PAGE):
            yield from page
            number = page[-1][0]

    def notes(self, what: str) -> list[Noted]:
        """Return all ``Noted`` entries whose ``what`` is this one."""
        query = "SELECT number, event FROM events WHERE instr(event, ?) ORDER BY number"
        with self._told():
            found = [self._event(*row) for row in self._database.execute(query, (what.encode(),))]
        return [event for event in found if isinstance(event, Noted) and event.what == what]

    def save_heartbeats(self) -> None:
        """Keep heartbeats that were put off, in a file beside the journal, if the process is killed."""
        if self._heartbeats and self._heartbeats != self._saved:
            with self._told():
                heartbeats.save(heartbeats.path_of(self.path), self._end.chain, self._heartbeats.values())
            self._saved = dict(self._heartbeats)

    def flush(self) -> None:
        """Write heartbeats that were put off."""
        if self._heartbeats:
            self._insert_after_heartbeats()

    def after(self, number: int, most: int) -> list[tuple[int, float, Event]]:
        """Return at most ``most`` events after event ``number``, with number and time."""
        chain = "chain" if self._chained else "NULL"
        query = f"SELECT number, at_s, event, {chain} FROM events WHERE number >= ? ORDER BY number LIMIT ?"
        with self._told():
            rows = self._database.execute(query, (number, most + 1)).fetchall()
            former = rows.pop(0)[3] if rows and rows[0][0] == number else START
            found = []
            for row in rows[:most]:
                self._check(row, former)
                found.append((row[0], row[1], self._event(row[0], row[2])))
                former = row[3]
        return found

    def _check(self, row: tuple[int, float, bytes, bytes], former: bytes) -> None:
        """Raise unless ``row`` is as it was written, after the event with the checksum ``former``."""
        number, at_s, event, chain = row
        whole = isinstance(at_s, float) and isinstance(event, bytes)
        if whole and self._chained:
            whole = isinstance(former, bytes) and link(former, number, at_s, event) == chain
        if not whole:
            raise ValueError(f"event {number} is not what was written")

    def _event(self, number: int, written: bytes) -> Event:
        """Return an entry's event; a note in its place if it has a value that no event may have."""
        try:
            return decode(written)
        except msgspec.ValidationError as error:
            reason = shortened(explain(error), _REASON_CHARACTERS)
            return Noted(UNREADABLE, details={"number": number, "reason": reason})

    def _insert_after_heartbeats(self, *entries: tuple[float, Event]) -> None:
        """Write the heartbeats that were put off, then ``entries``."""
        self._insert([*self._heartbeats.values(), *entries])
        self._written |= {rank: beat for rank, (_, beat) in self._heartbeats.items()}
        self._heartbeats.clear()

    def _insert(self, entries: list[tuple[float, Event]]) -> None:
        """Write ``entries``, all or none."""
        rows: list[tuple[int, float, bytes, bytes]] = []
        end = self._end
        for at_s, event in entries:
            encoded = _encoder.encode(event)
            chain = link(end.chain, end.number + 1, at_s, encoded)
            end = Head(end.number + 1, chain, end.introduced)
            rows.append((end.number, at_s, encoded, chain))
        self._fresh += len(rows)
        with self._told():
            if len(rows) == 1:
                self._database.execute(INSERT, rows[0])  # a transaction by itself
            else:
                with self._database:
                    self._database.execute("BEGIN")
                    self._database.executemany(INSERT, rows)
        self._note(end)

    def _note(self, end: Head) -> None:
        """Record the journal's end in the head file, after the write itself."""
        self._end = end
        if self._head is not None:
            with self._told():
                self._head.write(end)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn file errors inside the block into ``JournalError``."""
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, OverflowError, *NOT_A_VALUE) as error:
            raise JournalError(
                f"the journal {self.path} cannot be used: {error}",
                "make room or mend it, then `gpuslice up` goes on; the jobs run on meanwhile",
            ) from error


def _goes_back(former: Reported, message: Progress) -> bool:
    """Return True if the heartbeat ``former`` reported more than ``message`` does, as a rank never should."""
    before = former.message
    assert isinstance(before, Progress)
    counts = zip(
        (before.epoch, before.boundary, before.step),
        (message.epoch, message.boundary, message.step),
        strict=True,
    )
    return any(old > new for old, new in counts)


def _columns(database: sqlite3.Connection) -> list[str]:
    """Return the columns of the table of events; none if there is no such table."""
    return [row[1] for row in database.execute("PRAGMA table_info(events)")]
