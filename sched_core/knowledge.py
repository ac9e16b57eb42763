"""What a policy can be told of jobs: running times, losses and throughput, each also as "not known"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .interference import Sample
from .job import Job


class Knowledge(Protocol):
    """What is known about the running times of jobs.

    The duration of single jobs is shown only to policies that declare ``needs_durations``; the distribution
    of past jobs' service, where there is one, to all.
    """

    def duration_s(self, job: Job) -> float | None:
        """Return the running time of ``job`` on dedicated devices, or None if it is not known."""
        ...

    def measured(self, job: Job) -> bool:
        """Return True if the duration of ``job`` is more than a first guess: its steps were timed."""
        ...

    def services(self) -> Sequence[float]:
        """Return a sample of jobs' total services, in device-seconds. It is empty if none is known."""
        ...

    def edition(self) -> int:
        """Return the number of the edition of ``services``: another number when it has changed."""
        ...


class NoKnowledge:
    """The knowledge of a world in which nothing is known about running times."""

    def duration_s(self, job: Job) -> float | None:
        return None

    def measured(self, job: Job) -> bool:
        return True

    def services(self) -> Sequence[float]:
        return ()

    def edition(self) -> int:
        return 0


class Losses(Protocol):
    """The training losses that jobs report."""

    def loss(self, job: Job, now_s: float) -> float | None:
        """Return the newest loss of ``job``, or None if it reports none."""
        ...


class NoLosses:
    """The losses of a world in which no job reports any."""

    def loss(self, job: Job, now_s: float) -> float | None:
        return None


class Throughput(Protocol):
    """The speeds at which jobs trained: alone, beside others, and on how many devices."""

    def samples(self, job: Job, beside: Job | None) -> Sequence[Sample]:
        """Return the newest samples of ``job`` beside the job ``beside``, or, if that is None, alone."""
        ...

    def busy(self, job: Job) -> float | None:
        """Return the share of its device that ``job`` used when it was alone. Return None if not known."""
        ...

    def speeds(self, job: Job) -> Mapping[int, float]:
        """Return the progress per second of ``job``, as ``Job.rate``, by number of devices, if known."""
        ...


class NoThroughput:
    """The throughput of a world in which nothing is measured."""

    def samples(self, job: Job, beside: Job | None) -> Sequence[Sample]:
        return ()

    def busy(self, job: Job) -> float | None:
        return None

    def speeds(self, job: Job) -> Mapping[int, float]:
        return {}
