"""The plan of an experiment: every job alone and every set together, in each of several rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Literal, NamedTuple

from gpuslice.errors import UsageError

#: Numbers of jobs that run together, in ascending order; one number for a job alone.
Members = tuple[int, ...]
#: ``alone``; ``packed``: all train at the same time; ``sliced``: in turns, the others are suspended;
#: ``stressed``: one job beside our own loads; ``reference``: these loads beside each other, without a job.
Mode = Literal["alone", "packed", "sliced", "stressed", "reference"]


class Task(NamedTuple):
    """One trial of a plan: which jobs run, and how."""

    round: int
    members: Members
    mode: Mode


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds of trials. A set is only compared with its members alone in the same round.

    Parameters
    ----------
    jobs
        How many there are.
    size
        How many run together.
    repeats
        How many rounds.
    stress
        Kinds of load that run beside each job.
    sample
        Number of sets that are measured, chosen at random; None for all.

    Raises
    ------
    UsageError
        If there are too few jobs for a set, or too few rounds for an interval.
    """

    jobs: int
    size: int
    repeats: int
    stress: tuple[str, ...] = ()
    sample: int | None = None

    def __post_init__(self) -> None:
        if self.size < 2:
            raise UsageError(f"--subsets {self.size} is too small", "give 2 or more: scripts run together")
        if self.jobs < self.size:
            count = f"{self.jobs} script{'' if self.jobs == 1 else 's'}"
            raise UsageError(f"{count} for sets of {self.size}", "name more, or the same one again")
        if self.repeats < 2:
            raise UsageError(
                f"--repeats {self.repeats} is too few", "give 2 or more: an interval needs two rounds"
            )
        least = 0 if self.stress else 1
        if self.sample is not None and self.sample < least:
            raise UsageError(
                f"--sample {self.sample} measures no set", "give 1 or more, or add --stress to predict them"
            )

    @property
    def sets(self) -> list[Members]:
        """Sets of jobs that are measured together."""
        every = list(combinations(range(self.jobs), self.size))
        if self.sample is None or self.sample >= len(every):
            return every
        return sorted(Random(0).sample(every, self.sample))

    @property
    def pairs(self) -> list[Members]:
        """All pairs of jobs, measured or predicted."""
        return list(combinations(range(self.jobs), 2))

    def tasks(self) -> Iterator[Task]:
        """Yield the trials in order.

        The order differs from round to round, so that a drift of the machine affects all trials alike. It is
        the same at every call. In the first round all jobs run alone first. So it is known before any set
        runs whether a script works, and whether a set's memory fits.
        """
        for number in range(self.repeats):
            alone = [Task(number, (job,), "alone") for job in range(self.jobs)]
            together = [Task(number, members, mode) for members in self.sets for mode in ("packed", "sliced")]
            if self.stress:
                together += [Task(number, (job,), "stressed") for job in range(self.jobs)]
                together.append(Task(number, (), "reference"))
            if number == 0:
                yield from alone
                alone = []
            mixed = [*alone, *together]
            Random(number).shuffle(mixed)
            yield from mixed

    def remaining(self, done: Collection[Task]) -> list[Task]:
        """Return the tasks that are not among ``done``."""
        known = set(done)
        return [task for task in self.tasks() if task not in known]
