"""Fences: what is said of an earlier attempt of a job is known, and changes nothing.

Epochs fence the orders to ranks and their answers. Attempts fence processes: their Hellos and their ends.
"""

from __future__ import annotations

from gpuslice.sched_core.jobs.gang import Gang


def is_past(job: Gang, attempt: int | None, what: str) -> bool:
    """Return True if ``what`` was said of an earlier attempt of ``job`` than the present one.

    None stands for the present attempt: journals and processes of older versions name none.

    Raises
    ------
    IllegalTransitionError
        If there was no such attempt yet; nothing was changed.
    """
    if attempt is not None and attempt > job.attempt:
        raise job.illegal(f"{what} of attempt {attempt}, after attempt {job.attempt}")
    return attempt is not None and attempt < job.attempt
