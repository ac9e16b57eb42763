"""Waiting for what the scheduler says of a job."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuslice.client.client import Client
from gpuslice.verbs import JobInfo

from ..patience import PATIENCE_S


def until(client: Client, job: str, holds: Callable[[JobInfo], bool]) -> JobInfo:
    """Ask until it is so; between two looks we wait for the job's end, for a moment."""
    ends_s = time.monotonic() + PATIENCE_S
    while True:
        (found,) = [one for one in client.jobs() if one.id == job]
        if holds(found):
            return found
        assert not found.ended, found
        assert time.monotonic() < ends_s, found
        client.wait(job, 0.05)
