"""``gpuslice history``: what ran, how it ended, and the time on devices by user."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from gpuslice.config import parse_duration
from gpuslice.errors import NoSchedulerError, UsageError
from gpuslice.sched_core.journal.journal import FILE

from . import tables
from .client_commands import connect
from .declare import Option
from .options import Json, StateDir
from .tables import Row
from .text_width import cut, one_line

if TYPE_CHECKING:
    from .usage import JobUsage, UserUsage

_WHY_COLUMNS = 44


def command(
    since: Annotated[
        str | None, Option(metavar="7d", help="Only what ran in this time; else all that the journal has.")
    ] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Print what ran, how it ended, and hours by user.

    Hours are time on devices, times the number of devices.

    It is read from the journal, so the scheduler may be up or down.
    """
    from . import usage  # late: replaying a journal needs the core

    since_unix_s = -inf if since is None else time.time() - parse_duration(since)
    journal, now_s = _journal(state_dir)
    jobs = usage.read(journal, since_unix_s, now_s)
    users = usage.by_user(jobs)
    if as_json:
        print(msgspec.json.encode({"jobs": jobs, "users": users}).decode())
    else:
        tables.show([_JOBS, *map(_job_row, jobs)])
        print()
        tables.show([_USERS, *map(_user_row, users)])
    return 0


_JOBS = ("JOB", "USER", "STATE", "SUBMITTED", "ENDED", "DEVICE-H", "ATTEMPTS", "WHY")
_USERS = ("USER", "JOBS", "SUCCEEDED", "FAILED", "CANCELLED", "DEVICE-H")


def _job_row(job: JobUsage) -> Row:
    code = f"exit {job.exit_code}" if job.exit_code else ""
    why = ": ".join(filter(None, (", ".join(filter(None, (code, job.failure))), job.reason)))
    return (
        job.id,
        one_line(job.tenant) or "-",
        job.state,
        _clock(job.submitted_unix_s),
        _clock(job.ended_unix_s),
        f"{job.device_hours:.2f}",
        str(job.attempts),
        cut(one_line(why), _WHY_COLUMNS) or "-",
    )


def _user_row(user: UserUsage) -> Row:
    numbers = (user.jobs, user.succeeded, user.failed, user.cancelled)
    return (one_line(user.tenant) or "-", *map(str, numbers), f"{user.device_hours:.2f}")


def _clock(unix_s: float | None) -> str:
    if unix_s is None:
        return "-"
    return datetime.fromtimestamp(unix_s).isoformat(sep=" ", timespec="minutes")


def _journal(state_dir: Path | None) -> tuple[Path, float | None]:
    """Return the journal of the user's scheduler, and the time of its clock. None: it does not run."""
    with connect(state_dir) as client:
        if client.directory is None:
            raise UsageError(
                "a history is made of the journal, which is on the scheduler's machine and not here",
                "run `gpuslice history` there, or leave out --connect and GPUSLICE_CONNECT",
            )
        journal = client.directory / FILE
        try:
            return journal, client.status(fold=True).now_s
        except NoSchedulerError as error:
            if not journal.exists():
                raise
            sys.stderr.write(f"gpuslice: {error.message}: this is from its journal\n")
            return journal, None
