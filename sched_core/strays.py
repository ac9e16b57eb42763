"""Processes of a job that nobody watches: their launcher was killed, and no rank of them has said Hello."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path


def kill_strays(marks: Sequence[bytes]) -> int:
    """Kill every process of ours whose environment has all of ``marks``; returns how many that were.

    Parameters
    ----------
    marks
        Entries such as ``b"NAME=value"`` that no other job's processes have.
    """
    count = 0
    for pid in _pids():
        if not _is_marked(pid, marks):
            continue
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            # Once more: now the number is sure to be that of the process that gets the signal.
            if _is_marked(pid, marks):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                count += 1
        except ProcessLookupError:
            continue
        finally:
            os.close(descriptor)
    return count


def _pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            yield int(entry.name)


def _is_marked(pid: int, marks: Sequence[bytes]) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # gone, or another user's
    return all(mark in environ for mark in marks)
