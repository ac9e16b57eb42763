"""Begin a new journal with the jobs that are kept, if the scheduler that kept them was another one.

All that is new is made aside. Then a rename decides, after which ``finish`` puts the parts into their places.
Each of its steps can be repeated. So a kill at any moment leaves the jobs as they were kept, or taken over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuslice.checkpoint.files import flush_directory
from gpuslice.errors import GpusliceError, UsageError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.journal.head import path_of
from gpuslice.sched_core.journal.journal import FILE, Journal
from gpuslice.sched_core.lifecycle.events import Event, TakenOver
from gpuslice.sched_core.nodes import exit_record
from gpuslice.sched_core.nodes.endpoint import next_past

from . import kept_file

#: The new files before they are in their places, and before they are complete.
_READY, _PARTIAL = "taking-over", "taking-over.part"
#: Within it: what was there before.
_PAST = "past"
_REMEDY = "start with options that fit, or start it as before and cancel the job; the jobs stay kept"


def check(events: Sequence[Event], make_core: Callable[[], Core], now: float) -> None:
    """Check that the core of the new scheduler, which ``make_core`` makes, accepts ``events``.

    Raises
    ------
    UsageError
        If a job could not run. The error names the job.
    """
    core = make_core()
    try:
        for event in events:
            core.handle(event, now)
    except GpusliceError as error:
        raise UsageError(error.message, _REMEDY) from error


def replace_journal(directory: Path, events: Sequence[Event], setup: bytes, now: float) -> None:
    """Replace the journal in ``directory`` by a new one of ``events``, of which one is ``TakenOver``.

    What was there goes to ``past-N``, but for the logs of the jobs that are taken over.

    Parameters
    ----------
    setup
        The description of the new scheduler, for the journal.
    now
        The time on the scheduler's clock.
    """
    partial = directory / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    with Journal(partial / FILE) as journal:
        journal.introduce(setup)
        for event in events:
            journal.append(event, now, quiet=False)
    (partial / _PAST).mkdir()
    for path in (partial / FILE, path_of(partial / FILE)):
        _flush(path)
    flush_directory(partial)
    os.rename(partial, directory / _READY)
    flush_directory(directory)
    finish(directory)


def finish(directory: Path) -> None:
    """Complete what ``replace_journal`` has decided, if it was cut short. Else remove what is half-made."""
    shutil.rmtree(directory / _PARTIAL, ignore_errors=True)
    ready = directory / _READY
    if not ready.exists():
        return
    past, new = ready / _PAST, ready / FILE
    if past.exists():
        if new.exists():  # so the journal in its place, if any, is the old one
            for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
                _move(directory / name, past / name)
            head, new_head = path_of(directory / FILE), path_of(new)
            if new_head.exists():
                _move(head, past / head.name)
                os.rename(new_head, head)
            os.rename(new, directory / FILE)
        _set_logs_aside(directory, past / "logs")
        _move(directory / kept_file.FILE, past / kept_file.FILE)
        flush_directory(directory)
        os.rename(past, next_past(directory))
    shutil.rmtree(ready)
    flush_directory(directory)


def _set_logs_aside(directory: Path, past: Path) -> None:
    """Move the logs of jobs that the new journal does not have."""
    past.mkdir(exist_ok=True)
    with Journal(directory / FILE, read_only=True) as journal:
        taken = next(event for event, _ in journal.replay() if isinstance(event, TakenOver))
    kept = {one.spec.id for one in taken.kept.jobs}
    for path in sorted((directory / "logs").glob("*")):
        if exit_record.job_of(path) not in kept:
            _move(path, past / path.name)


def _move(source: Path, target: Path) -> None:
    if source.exists():
        os.rename(source, target)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
