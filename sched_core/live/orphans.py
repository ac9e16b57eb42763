"""Processes of a job that no signal of ours reaches: their launcher was killed, or they left its session."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpuslice.clock import MonotonicClock

#: Far more than dying takes; what hangs in the kernel is not waited for.
_DYING_S = 1.0


def kill_orphans(marks: Sequence[bytes]) -> int:
    """Kill every process of ours whose environment has all of ``marks``; returns how many that were.

    They are gone then, as a rule.

    Parameters
    ----------
    marks
        Entries such as ``b"NAME=value"`` that no other job's processes have.
    """
    killed = [descriptor for pid in _pids() if (descriptor := _kill(pid, marks)) is not None]
    clock = MonotonicClock()
    ends_s = clock.now() + _DYING_S
    for descriptor in killed:
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        end.poll(max(0.0, ends_s - clock.now()) * 1000.0)
        os.close(descriptor)
    return len(killed)


def _kill(pid: int, marks: Sequence[bytes]) -> int | None:
    """Kill ``pid`` if it is marked; returns a descriptor that can be read when it is gone."""
    if not _is_marked(pid, marks):
        return None
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        # Once more: now the number is sure to be that of the process that gets the signal.
        if _is_marked(pid, marks):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return descriptor
    except ProcessLookupError:
        pass  # it has ended by itself
    os.close(descriptor)
    return None


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
