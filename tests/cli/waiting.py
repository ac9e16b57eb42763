"""Waiting for what the scheduler says of a job."""

from __future__ import annotations

from collections.abc import Callable

from gpuslice.client.client import Client
from gpuslice.verbs import JobInfo


def until(client: Client, job: str, holds: Callable[[JobInfo], bool]) -> JobInfo:
    """Ask until it is so; between two looks we wait for the job's end, for a moment."""
    for _ in range(2400):
        (found,) = [one for one in client.jobs() if one.id == job]
        if holds(found):
            return found
        client.wait(job, 0.05)
    raise AssertionError(found)
