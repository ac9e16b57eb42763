"""What a policy can be told of jobs: running times, losses, throughput; and that nothing is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .interference import Sample
from .job import Job


class Knowledge(Protocol):
    """What is known about running times.

    The duration of single jobs is shown only to policies that declare ``needs_durations``; the distribution
    of past jobs' service, where there is one, to all.
    """

    def duration_s(self, job: Job) -> float | None:
        """Running time of ``job`` on dedicated devices, or ``None`` if nobody knows."""
        ...

    def measured(self, job: Job) -> bool:
        """Whether that is more than a first guess; ``False`` while steps of ``job`` are yet to be timed."""
        ...

    def services(self) -> Sequence[float]:
        """A sample of total services, in device-seconds; empty if nobody knows."""
        ...

    def edition(self) -> int:
        """Which one ``services`` is: another number when it has changed."""
        ...


class NoKnowledge:
    """Nothing is known."""

    def duration_s(self, job: Job) -> float | None:
        return None

    def measured(self, job: Job) -> bool:
        return True

    def services(self) -> Sequence[float]:
        return ()

    def edition(self) -> int:
        return 0


class Losses(Protocol):
    """What jobs report of their training loss."""

    def loss(self, job: Job, now_s: float) -> float | None:
        """The newest loss of ``job``, or ``None`` if it reports none."""
        ...


class NoLosses:
    """No job reports any."""

    def loss(self, job: Job, now_s: float) -> float | None:
        return None


class Throughput(Protocol):
    """How fast jobs trained: alone, beside others, and on how many devices."""

    def samples(self, job: Job, beside: Job | None) -> Sequence[Sample]:
        """The newest samples of ``job`` beside that one alone, or with a device for itself."""
        ...

    def busy(self, job: Job) -> float | None:
        """The share of its device that ``job`` used when it was alone; ``None``: not known."""
        ...

    def speeds(self, job: Job) -> Mapping[int, float]:
        """Progress per second of ``job``, as ``Job.rate``, by the numbers of devices that it is known of."""
        ...


class NoThroughput:
    """Nobody measures."""

    def samples(self, job: Job, beside: Job | None) -> Sequence[Sample]:
        return ()

    def busy(self, job: Job) -> float | None:
        return None

    def speeds(self, job: Job) -> Mapping[int, float]:
        return {}
