"""Estimates of how long live jobs still run, from the jobs' own reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from gpuslice.sched_core.job import Job

from .gang import Gang

#: How many jobs must have succeeded before there is a distribution, and how many of the newest it keeps.
ENOUGH = 50
_MOST = 1000


class Estimates:
    """``Knowledge`` from jobs that said how many steps they have: steps left times the time of a step so far.

    The time is for as many devices as the job asks for. ``Job.rate`` says how much faster the job is on more.

    What the owner expects counts until the time of a step is measured, and for jobs that gave no number of
    steps. Without an expectation, a job that has made no step yet counts as almost done, so that it runs
    first and is measured. A job that gave no number of steps comes last, and so does one that exceeds its own
    number.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ended: deque[float] = deque(maxlen=_MOST)
        self._count = 0
        self._sample: tuple[float, ...] = ()
        self._edition = 0
        #: The number of succeeded jobs at which the next edition is made.
        self._next = ENOUGH

    def duration_s(self, job: Job) -> float | None:
        """Return the estimated seconds that ``job`` runs in all on dedicated devices; infinite if unknown."""
        return job.progress_at(self.now_s) + self._left_s(job)

    def measured(self, job: Job) -> bool:
        """Return True if the steps of ``job`` have been timed, or need not be.

        They need not be if the job gave no number of steps, or said how long it takes.
        """
        if not isinstance(job, Gang) or not job.spec.steps or job.spec.expected_s:
            return True
        return job.step_time.step_s is not None

    def services(self) -> Sequence[float]:
        """Return the attained services of the newest jobs that succeeded; empty before ``ENOUGH`` have."""
        return self._sample

    def edition(self) -> int:
        """Return the version of ``services``, which changes when half as many more jobs have ended."""
        return self._edition

    def learn(self, job: Job) -> None:
        """Add the attained service of ``job``, which has succeeded, to the distribution."""
        if not job.service_s:
            return  # it did not train
        self._ended.append(job.service_s)
        self._count += 1
        if self._count >= self._next:
            self._next = self._count + (self._count + 1) // 2
            self._sample = tuple(self._ended)
            self._edition += 1

    def _left_s(self, job: Job) -> float:
        if not isinstance(job, Gang):
            return inf
        if job.spec.expected_s and (not job.spec.steps or job.step_time.step_s is None):
            left_s = job.spec.expected_s - job.progress_at(self.now_s)
            return left_s if left_s > 0 else inf
        if not job.spec.steps:
            return inf
        steps = job.steps
        if steps > job.spec.steps:
            return inf
        done_s, step_s = job.progress_at(self.now_s), job.step_time.step_s
        if step_s is not None:
            left_s = (job.spec.steps - job.step_time.step) * step_s
            return max(0.0, left_s - (done_s - job.step_time.at_s))
        return (job.spec.steps - steps) * done_s / steps if steps else 0.0
