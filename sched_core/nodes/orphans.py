"""Signal the processes of a job that only their environment identifies.

Their launcher was killed, or they left its session.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpuslice import config
from gpuslice.clock import MonotonicClock

#: Longest wait for a killed process: far more than dying takes, unless it hangs in the kernel.
_DYING_S = 1.0
#: Most processes that are waited for: each takes a descriptor.
_AWAITED = 16
#: What names the attempt in the environment of a job's process.
_ATTEMPT = os.fsencode(f"{config.variable('attempt')}=")
_log = logging.getLogger(__name__)


def kill_orphans(job: str, endpoint: str, attempt: int | None = None) -> None:
    """Kill all remaining processes of ``job``, of the scheduler at ``endpoint``, in any session.

    As a rule they are gone when this returns.

    Parameters
    ----------
    attempt
        If given, processes of later attempts are left alone.
    """
    marks = {config.variable("socket"): endpoint, config.variable("job"): job}
    killed, awaited = 0, list[int]()
    for _, descriptor in _signal(marks, signal.SIGKILL, attempt):
        killed += 1
        if len(awaited) < _AWAITED:
            awaited.append(descriptor)
        else:
            os.close(descriptor)
    clock = MonotonicClock()
    ends_s = clock.now() + _DYING_S
    for descriptor in awaited:
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        end.poll(max(0.0, ends_s - clock.now()) * 1000.0)
        os.close(descriptor)
    if killed:
        _log.info("killed %d processes that job %s left behind", killed, job)


def signal_marked(marks: Mapping[str, str], number: signal.Signals) -> set[int]:
    """Send a signal to every process started with all of these variables. Return their ids."""
    told = set()
    for pid, descriptor in _signal(marks, number):
        os.close(descriptor)
        told.add(pid)
    return told


def _signal(
    marks: Mapping[str, str], number: signal.Signals, attempt: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield each signalled process and a descriptor, to be closed, that is readable when it is gone."""
    words = [os.fsencode(f"{name}={value}") for name, value in marks.items()]
    for pid in _pids():
        if (descriptor := _signal_one(pid, words, number, attempt)) is not None:
            yield pid, descriptor


def _signal_one(pid: int, marks: Sequence[bytes], number: signal.Signals, attempt: int | None) -> int | None:
    if not _is_marked(pid, marks, attempt):
        return None
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        # Once more: now the number is sure to be that of the process that gets the signal.
        if _is_marked(pid, marks, attempt):
            signal.pidfd_send_signal(descriptor, number)
            return descriptor
    except ProcessLookupError:
        pass  # it has ended by itself
    os.close(descriptor)
    return None


def _pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            yield int(entry.name)


def _is_marked(pid: int, marks: Sequence[bytes], attempt: int | None) -> bool:
    """Return True if a process has all ``marks`` in its environment and is of no later attempt."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # gone, or another user's
    return all(mark in environ for mark in marks) and not (
        attempt is not None and _is_later(environ, attempt)
    )


def _is_later(environ: Sequence[bytes], attempt: int) -> bool:
    """Return True if ``environ`` names a later attempt. Processes of older versions name none."""
    found = (entry.removeprefix(_ATTEMPT) for entry in environ if entry.startswith(_ATTEMPT))
    return any(text.isdigit() and int(text) > attempt for text in found)
