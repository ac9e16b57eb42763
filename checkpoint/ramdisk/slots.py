"""A store's directory: which snapshots lie in it, which is the newest whole one, what may be thrown away.

- ``owner``: locked by the living process, which it names
- ``A.gsnp``, ``B.gsnp``: the two slots
- ``A.<32 hex digits>``, ``B.<...>``: pieces of the one or the other, which other ranks may have, too
- ``room``: a socket, while its process is parked (``room_requests``)
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Container, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from gpuslice.checkpoint.files import open_checked, write_at
from gpuslice.checkpoint.format.gsnp import Record
from gpuslice.checkpoint.format.pieces import KEY_BYTES
from gpuslice.checkpoint.format.reader import open_snapshot, record_of
from gpuslice.errors import SnapshotError

SLOTS = ("A.gsnp", "B.gsnp")
OWNER = "owner"
_OWNER_LIMIT_BYTES = 4096


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process that holds a store, for people to read. The lock on the file says who really holds it.

    ``started_s``, in seconds since 1970, is when the process started. ``tenant`` is the tenant whose bytes
    the store's are, ``scheduler`` the directory of the job's scheduler.
    """

    job: str | None
    rank: int
    pid: int
    started_s: float
    tenant: str = ""
    tenant_limit_bytes: int | None = None
    scheduler: str = ""

    @property
    def lives(self) -> bool:
        """True if the process exists: not a zombie, and not a later process with its pid."""
        try:
            process = psutil.Process(self.pid)
            later = process.create_time() >= self.started_s + 1.0
            return not later and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def write_owner(descriptor: int, owner: Owner) -> None:
    """Write this process into an open, locked owner file."""
    os.ftruncate(descriptor, 0)
    write_at(descriptor, msgspec.json.encode(owner), 0)


def read_owner(directory: Path) -> Owner | None:
    """Return the last owner of the store, or None if its process died before it could write it."""
    try:
        descriptor = open_checked(directory / OWNER)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(os.pread(descriptor, _OWNER_LIMIT_BYTES, 0), type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    finally:
        os.close(descriptor)


def published(directory: Path) -> list[Record]:
    """Return the records of the published snapshots in the directory, newest first.

    A slot that was being written when its process died has no header and does not count.
    """
    found = []
    for slot, name in enumerate(SLOTS):
        with suppress(SnapshotError):
            record = record_of(directory / name)
            if record.slot == slot:
                found.append(record)
    return sorted(found, key=lambda record: record.generation, reverse=True)


def restartable(directory: Path) -> Iterator[Record]:
    """Yield the records of snapshots that can be opened and are restartable, newest first."""
    for record in published(directory):
        if record.restartable:
            with suppress(SnapshotError), open_snapshot(directory / SLOTS[record.slot]):
                yield record


def pieces_of(slot: Path) -> list[Path]:
    """Return the complete pieces beside a slot's file."""
    name = re.compile(rf"{re.escape(slot.stem)}\.[0-9a-f]{{{2 * KEY_BYTES}}}")
    return [slot.with_name(one) for one in os.listdir(slot.parent) if name.fullmatch(one)]


def remove_pieces(slot: Path, kept: Container[str] = ()) -> None:
    """Remove a slot's pieces except names in ``kept``. Other ranks keep their names of the same files."""
    with suppress(FileNotFoundError):
        for name in os.listdir(slot.parent):
            if name.startswith(f"{slot.stem}.") and name != slot.name and name not in kept:
                (slot.parent / name).unlink(missing_ok=True)


def settle(directory: Path, kept: Collection[Record] = ()) -> bool:
    """Remove a dead store's files except the snapshots in ``kept``. Return True if the directory is left.

    The caller holds the store's lock and the RAM disk's.
    """
    needed = {OWNER} if kept else set()
    for record in kept:
        pieces = (piece.name for piece in pieces_of(directory / SLOTS[record.slot]))
        needed |= {SLOTS[record.slot], *pieces}
    for entry in list(os.scandir(directory)):
        if entry.name not in needed:
            os.unlink(entry.path)
    if not kept:
        directory.rmdir()
    return bool(kept)
