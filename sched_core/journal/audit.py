"""Check a journal: every event must be there, as it was written, up to the last one.

The journal is only read, so that a damaged one stays as it is until a person decides what to do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .head import START, Head, checksum, decode, link, path_of

#: Errors of the disk or its permissions, not of the journal's content.
_OF_THE_SYSTEM = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
    }
)
#: A stored event: number, time, the encoded event.
Row = tuple[int, float, bytes]


@dataclass(slots=True)
class Audit:
    """The result of a check: the intact part of a journal, and its problem.

    Attributes
    ----------
    problem
        What is wrong with it; empty: nothing.
    head
        The end of the intact part.
    setup
        What core it is of, if that is known for certain.
    chained
        True if it has checksums; journals of former versions have none.
    noted
        The end of the journal as the head file has it, if there is one.
    noted_chain
        The running checksum of the event with which it ends by that.
    """

    problem: str = ""
    head: Head = field(default_factory=Head)
    setup: bytes | None = None
    chained: bool = False
    noted: Head | None = None
    noted_chain: bytes = START

    @property
    def missing(self) -> int:
        """Number of events that are known to be missing."""
        return 0 if self.noted is None else max(0, self.noted.number - self.head.number)


def audit(path: Path) -> Audit:
    """Read all of the journal at ``path``, and return the result of the check.

    Raises
    ------
    sqlite3.Error, OSError
        If it cannot be read for reasons that have nothing to do with what is in it.
    """
    found = Audit()
    found.noted, found.problem = _noted(path_of(path))
    if path.exists():
        try:
            _read(path, found)
        except sqlite3.Error as error:
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _OF_THE_SYSTEM:
                raise
            found.problem = found.problem or str(error)
        except (ValueError, OverflowError) as error:  # e.g. text that is not UTF-8
            found.problem = found.problem or str(error)
    if not found.problem:
        found.problem = _compare(found)
    return found


def whole(path: Path, found: Audit) -> Iterator[Row]:
    """Yield the events that ``found`` calls intact, from the journal at ``path``."""
    if not found.head.number:
        return  # there may be no file
    database = _open(path)
    try:
        query = "SELECT number, at_s, event FROM events WHERE number <= ? ORDER BY number"
        yield from database.execute(query, (found.head.number,))
    finally:
        database.close()


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", isolation_level=None, uri=True)


def _noted(path: Path) -> tuple[Head | None, str]:
    """Return the content of the head file at ``path`` (None without one), and what is wrong with it.

    A process that was killed while creating the file leaves it empty.
    """
    try:
        return (decode(line) if (line := path.read_bytes()) else None), ""
    except FileNotFoundError:
        return None, ""
    except ValueError as error:
        return None, f"{path.name}, which says where it ends, is damaged: {error}"


def _read(path: Path, found: Audit) -> None:
    """Fill in ``found`` with the intact part of the journal."""
    database = _open(path)
    try:
        columns = [row[1] for row in database.execute("PRAGMA table_info(events)")]
        if not columns:
            return  # nothing was ever written, or all of it is gone
        found.chained = "chain" in columns
        noted = 0 if found.noted is None else found.noted.number
        for number, stored, chain in _events(database, found):
            if found.chained and stored != chain:
                found.problem = found.problem or f"event {number} is not what was written"
                return
            found.head = Head(number, chain)
            if number == noted:
                found.noted_chain = chain
        found.setup, wrong = _setup(database, checked=found.chained)
        found.head = Head(found.head.number, found.head.chain, found.setup is not None)
        found.problem = found.problem or wrong or _integrity(database)
    finally:
        database.close()


def _events(database: sqlite3.Connection, found: Audit) -> Iterator[tuple[int, object, bytes]]:
    """Yield every event's number, its stored checksum and the right one, up to the first malformed event."""
    chain, following = START, "chain" if found.chained else "NULL"
    for row in database.execute(f"SELECT number, at_s, event, {following} FROM events ORDER BY number"):
        number, at_s, event, stored = row
        if not (isinstance(number, int) and isinstance(at_s, float) and isinstance(event, bytes)):
            found.problem = found.problem or f"event {number!r} is not what was written"
            return
        chain = link(chain, number, at_s, event)
        yield number, stored, chain


def _setup(database: sqlite3.Connection, *, checked: bool) -> tuple[bytes | None, str]:
    """Return the journal's description of its core, and what is wrong with it."""
    about = dict(database.execute("SELECT name, value FROM about").fetchall())
    setup = about.get("setup")
    if setup is None and "setup_sum" not in about:
        return None, ""
    if not isinstance(setup, bytes) or (checked and about.get("setup_sum") != checksum(setup)):
        return None, "what scheduler it is of is not what was written"
    return setup, ""


def _integrity(database: sqlite3.Connection) -> str:
    (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    return "" if found == "ok" else str(found)


def _compare(found: Audit) -> str:
    """Return what is wrong with the journal's end, compared with the noted end; "" if nothing is."""
    noted = found.noted
    if noted is None:
        empty = not found.head.number and found.setup is None
        return "" if empty or not found.chained else "the file that says where it ends is gone"
    if noted.number > found.head.number:
        return f"it ends with event {found.head.number}, and {noted.number} were written"
    if noted.introduced and found.setup is None:
        return "what scheduler it is of is missing"
    return "" if found.noted_chain == noted.chain else f"event {noted.number} is not what was written"
