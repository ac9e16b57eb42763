"""Move a job to other devices, say what that is expected to take, and follow it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpuslice.client.client import Client
from gpuslice.config import format_size
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.verbs import JobInfo, Moving

from .client_commands import connect, exit_status

_LOOK_AGAIN_S = 0.2


def migrate(
    job: str, *, to: str, wait: bool = False, as_json: bool = False, state_dir: str | Path | None = None
) -> int:
    """Move a job to other devices. Return 0, or with ``wait`` how the job ended if it ended before.

    Raises
    ------
    EnvironmentUnusableError
        With ``wait``, if the job stays where it is, or went back.
    """
    with connect(state_dir) as client:
        moving = client.migrate(job, [name.strip() for name in to.split(",")])
        if not as_json:
            print(described(moving), flush=True)
        status = _follow(client, moving) if wait else 0
    if as_json:
        known = {"id": job, "from": moving.present, "to": moving.to, "bytes": moving.nbytes}
        print(msgspec.json.encode({**known, "expected_s": moving.expected_s}).decode())
    return status


def described(moving: Moving) -> str:
    """Return in words from where to where a job goes, with how many bytes, and about how long."""
    where = f"from {','.join(moving.present)} " if moving.present else ""
    parts = [f"{moving.job} goes {where}to {','.join(moving.to)}"]
    if moving.nbytes is not None:
        parts.append(format_size(moving.nbytes))
    if moving.expected_s is not None:
        parts.append(f"about {moving.expected_s:.2g} s")
    return ", ".join(parts)


def _follow(client: Client, moving: Moving) -> int:
    """Wait until a job trains where it was to be moved. Return 0, or how it ended if it ended before."""
    said = ""
    while not _is_there(job := _find(client.jobs(), moving.job), moving):
        if job.ended:
            return exit_status(job)
        if job.not_moved is not None:
            raise EnvironmentUnusableError(
                f"job {job.id} was {job.not_moved}", "it goes on where it was; `gpuslice events` says more"
            )
        if job.why is not None and job.why != said:
            said = job.why
            sys.stderr.write(f"gpuslice: {job.id}: {said}\n")
        time.sleep(_LOOK_AGAIN_S)
    return 0


def _is_there(job: JobInfo, moving: Moving) -> bool:
    """Return True if ``job`` trains on the devices that it was to be moved to."""
    return job.state == "running" and job.why is None and set(job.devices) == set(moving.to)


def _find(jobs: Sequence[JobInfo], name: str) -> JobInfo:
    return next(job for job in jobs if job.id == name)
