"""Processes of a job that no signal of ours reaches: their launcher was killed, or they left its session."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpuslice import config
from gpuslice.clock import MonotonicClock

#: Far more than dying takes; what hangs in the kernel is not waited for.
_DYING_S = 1.0
_log = logging.getLogger(__name__)


def kill_orphans(job: str, endpoint: str) -> None:
    """Kill what is left of ``job``, of the scheduler at ``endpoint``, in whichever sessions.

    It is gone then, as a rule.
    """
    own = {config.variable("socket"): endpoint, config.variable("job"): job}
    marks = [os.fsencode(f"{name}={value}") for name, value in own.items()]
    killed = [descriptor for pid in _pids() if (descriptor := _kill(pid, marks)) is not None]
    clock = MonotonicClock()
    ends_s = clock.now() + _DYING_S
    for descriptor in killed:
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        end.poll(max(0.0, ends_s - clock.now()) * 1000.0)
        os.close(descriptor)
    if killed:
        _log.info("killed %d processes that job %s left behind", len(killed), job)


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
