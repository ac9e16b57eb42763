"""A note in a job's store that says why no process can continue from its snapshots."""

from __future__ import annotations

import os
from pathlib import Path

from gpuslice.checkpoint.files import open_checked, read_at, write_at

_NAME = "not-restartable"
_MOST_BYTES = 2000


def write_note(directory: Path, reason: str) -> None:
    """Replace the note in a store. The process that starts next reads it.

    Raises
    ------
    RefusedSnapshotError, RamDiskFullError
        If it cannot be written.
    """
    descriptor = open_checked(directory / _NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_at(descriptor, reason.encode(errors="replace")[:_MOST_BYTES], 0)
    finally:
        os.close(descriptor)


def take_note(directory: Path) -> str:
    """Remove the note of a store, and return its printable text; "" if there is none.

    Raises
    ------
    RefusedSnapshotError
        If it is no file of this user's own.
    """
    try:
        descriptor = open_checked(directory / _NAME)
    except FileNotFoundError:
        return ""
    try:
        size_bytes = min(os.fstat(descriptor).st_size, _MOST_BYTES)
        data = read_at(descriptor, size_bytes, 0)
    finally:
        os.close(descriptor)
    (directory / _NAME).unlink(missing_ok=True)
    return "".join(letter for letter in data.decode(errors="replace") if letter.isprintable())
