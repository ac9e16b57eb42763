"""How long live jobs still run, as far as their own reports tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from gpuslice.sched_core.job import Job
from gpuslice.sched_core.jobs.gang import Gang

#: Jobs whose attained service makes a distribution, and of how many, the newest, it is made at most.
ENOUGH = 50
_MOST = 1000


class Estimates:
    """``Knowledge`` of jobs that said how many steps they have: steps left times the time of a step so far.

    That is the time on as many devices as they ask for: ``Job.rate`` says how much faster they are on more.

    Until that is measured, and of jobs that did not say, what their owners expect counts. Where nobody
    expects anything, a job that has made no step yet counts as almost done, so that it runs first and is
    measured; one that did not say how many steps it has comes last, as does one that needs more than it said.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ended: deque[float] = deque(maxlen=_MOST)
        self._count = 0
        self._sample: tuple[float, ...] = ()
        self._edition = 0
        #: How many jobs must have ended for the next edition.
        self._next = ENOUGH

    def duration_s(self, job: Job) -> float | None:
        """Running time of ``job`` on dedicated devices, estimated; infinite if nobody knows."""
        return job.progress_at(self.now_s) + self._left_s(job)

    def measured(self, job: Job) -> bool:
        """Whether its steps have been timed, if it said how many it has and not how long it takes."""
        if not isinstance(job, Gang) or not job.spec.steps or job.spec.expected_s:
            return True
        return job.step_time.step_s is not None

    def services(self) -> Sequence[float]:
        """What the newest jobs that ended well attained; empty before ``ENOUGH`` of them have."""
        return self._sample

    def edition(self) -> int:
        """Renewed whenever half as many more have ended."""
        return self._edition

    def learn(self, job: Job) -> None:
        """``job`` ended well, having attained what it needed."""
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
