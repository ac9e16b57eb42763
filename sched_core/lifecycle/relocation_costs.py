"""The costs of relocations: how long a job stands still that goes to new processes on another node.

The larger part of a relocation is a start of the command: its imports and its set-up. Every job has been
started once before, so that part is known before its first relocation. What a relocation takes beyond a start
is learnt from the relocations of all jobs.
"""

from __future__ import annotations

from collections import deque

from gpuslice.sched_core.jobs.gang import Gang

#: How many relocations, the newest, the expected excess of the next one is the mean of.
_RELOCATIONS = 20


class RelocationCosts:
    """The measured costs of one scheduler's relocations, and what is expected of the next one."""

    def __init__(self) -> None:
        #: How long the last start of each job on its own node took, by id. Only of jobs that have not ended.
        self._starts_s: dict[str, float] = {}
        #: How much longer than a start the newest relocations took, and how long they took.
        self._excess_s: deque[float] = deque(maxlen=_RELOCATIONS)
        self._relocations_s: deque[float] = deque(maxlen=_RELOCATIONS)

    def expected_s(self, job: Gang) -> float | None:
        """Return how long ``job`` is expected to stand still if it goes to another node. None: not known."""
        start_s = self._starts_s.get(job.id, _greeting_s(job))
        if not start_s:  # not known, or in a world without processes
            return _mean(self._relocations_s)
        return start_s + (_mean(self._excess_s) or 0.0)

    def started(self, job: Gang, setup_s: float) -> None:
        """Note that ``job``, started where it had been or for the first time, trains after ``setup_s``."""
        if (greeting_s := _greeting_s(job)) is not None:
            self._starts_s[job.id] = greeting_s + setup_s

    def relocated(self, job: Gang, blackout_s: float) -> None:
        """Note that ``job`` stood still for ``blackout_s`` seconds while it went to another node."""
        self._relocations_s.append(blackout_s)
        if (start_s := self._starts_s.get(job.id)) is not None:
            self._excess_s.append(max(0.0, blackout_s - start_s))

    def forget(self, job: Gang) -> None:
        """Drop what is known of ``job``, which has ended."""
        self._starts_s.pop(job.id, None)


def _greeting_s(job: Gang) -> float | None:
    """Return how long it took from the start of the command of ``job`` to its first Hello. None: no Hello."""
    first_hello_s = job.processes.first_hello_s
    return None if first_hello_s is None else first_hello_s - job.command.launched_s


def _mean(values_s: deque[float]) -> float | None:
    return sum(values_s) / len(values_s) if values_s else None
