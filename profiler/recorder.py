"""Record a job's activity between its boundaries, in its own process, for about a microsecond each.

The boundaries at which a step ends cut the run into intervals. ``steps`` computes step times from them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter, process_time
from typing import Protocol

import msgspec

from .memory import MemoryUse
from .skew import Skew

#: Least time between two readings of the memory, each of which costs some microseconds.
_MEMORY_EVERY_S = 0.1


class MemoryMeter(Protocol):
    """Measures the memory of this process on its device."""

    def sample(self) -> None:
        """Record the memory in use; called at boundaries."""
        ...

    def report(self) -> MemoryUse:
        """Return the memory that was recorded."""
        ...


class DeviceClock(Protocol):
    """Measures time on the device itself, where work is queued (CUDA events)."""

    def mark(self) -> None:
        """Record a moment; called at every boundary at which a step ends."""
        ...

    def intervals_s(self) -> list[float]:
        """Return the seconds between successive marks, shape (marks - 1,). Waits for the device."""
        ...


class Recording(msgspec.Struct, frozen=True):
    """The recording of one rank. All lists have one value for each interval.

    Attributes
    ----------
    rank
        Rank of the process.
    clock
        Where ``interval_s`` comes from: ``monotonic`` or ``cuda``.
    interval_s
        From one boundary at which a step ends to the next.
    fetching_s
        The part of it in which the script waited for batches of a DataLoader.
    after_step_s
        The part between the last optimizer step and the boundary.
    batches
        How many batches were fetched.
    without_grad
        How many of them while gradients were not computed: for an evaluation.
    recorder_s
        What recording took, in all.
    total_s
        What the intervals took on the host's clock, in all.
    cpu_s
        The processor time of all threads of the process meanwhile.
    begun_s
        The first boundary on the host's monotonic clock, which all processes of a host share.
    """

    rank: int
    clock: str
    interval_s: list[float]
    fetching_s: list[float]
    after_step_s: list[float]
    batches: list[int]
    without_grad: list[int]
    recorder_s: float
    total_s: float
    cpu_s: float = 0.0
    memory: MemoryUse | None = None
    skew: Skew | None = None
    begun_s: float = 0.0


class StepRecorder:
    """Cuts the time of a process into intervals of one step each.

    Parameters
    ----------
    memory
        Asked now and then, at boundaries.
    device_clock
        For devices that work behind the host's back.
    clock
        Seconds, never running backwards.
    cpu_clock
        Seconds of processor time of the process.
    """

    def __init__(
        self,
        memory: MemoryMeter | None = None,
        device_clock: DeviceClock | None = None,
        clock: Callable[[], float] = perf_counter,
        cpu_clock: Callable[[], float] = process_time,
    ) -> None:
        self._memory = memory
        self._device_clock = device_clock
        self._clock = clock
        self._cpu_clock = cpu_clock
        #: Processor time at the first boundary.
        self._cpu_s = 0.0
        #: One row per boundary at which a step ended: time, and what happened since the row before.
        self._rows: list[tuple[float, float, float, int, int]] = []
        self._fetching_s = 0.0
        self._batches = 0
        self._without_grad = 0
        self._stepped_s: float | None = None
        self._memory_s = 0.0
        self._memory_due_s = 0.0
        self._steps = 0
        #: Number of hook calls, for the cost of recording.
        self._calls = 0

    @property
    def intervals(self) -> int:
        """Number of complete intervals."""
        return max(0, len(self._rows) - 1)

    def fetched(self, since_s: float, *, grad: bool) -> None:
        """Record that a batch has arrived for which the script waited since ``since_s``."""
        self._fetching_s += self._clock() - since_s
        self._batches += 1
        self._without_grad += not grad

    def exhausted(self, since_s: float) -> None:
        """Record that the script waited since ``since_s`` for a batch that does not come."""
        self._fetching_s += self._clock() - since_s

    def stepped(self) -> None:
        """Record that an optimizer's step has ended now."""
        self._stepped_s = self._clock()

    def boundary(self, steps: int) -> None:
        """Record a boundary after ``steps`` steps. If a step has ended, an interval is complete."""
        self._calls += 1
        if steps == self._steps and self._rows:
            return
        self._steps = steps
        now = self._clock()
        after_s = 0.0 if self._stepped_s is None else now - self._stepped_s
        if not self._rows:
            self._cpu_s = self._cpu_clock()
        self._rows.append((now, self._fetching_s, after_s, self._batches, self._without_grad))
        self._fetching_s, self._batches, self._without_grad, self._stepped_s = 0.0, 0, 0, None
        if self._device_clock is not None:
            self._device_clock.mark()
        if self._memory is not None and now >= self._memory_due_s:
            self._memory.sample()
            done = self._clock()
            self._memory_due_s = done + _MEMORY_EVERY_S
            self._memory_s += done - now

    def finish(self, rank: int = 0, skew: Skew | None = None) -> Recording:
        """Return the recording; called at the last boundary. Time before the first one is no interval."""
        cpu_s = self._cpu_clock() - self._cpu_s if self._rows else 0.0
        rows, clock = self._rows, "monotonic"
        intervals_s = [later[0] - earlier[0] for earlier, later in pairwise(rows)]
        total_s = sum(intervals_s)
        if self._device_clock is not None and rows:
            clock, intervals_s = "cuda", self._device_clock.intervals_s()
        hooks_s = self._calls * hooks_cost_s(self._device_clock)
        return Recording(
            rank,
            clock,
            intervals_s,
            fetching_s=[row[1] for row in rows[1:]],
            after_step_s=[row[2] for row in rows[1:]],
            batches=[row[3] for row in rows[1:]],
            without_grad=[row[4] for row in rows[1:]],
            recorder_s=hooks_s + self._memory_s,
            total_s=total_s,
            cpu_s=cpu_s,
            memory=None if self._memory is None else self._memory.report(),
            skew=skew,
            begun_s=rows[0][0] if rows else 0.0,
        )


def hooks_cost_s(device_clock: DeviceClock | None = None, rounds: int = 200) -> float:
    """Return the cost of recording one ordinary step, without memory: a fetch, a step, a boundary.

    Marks of ``device_clock`` are made after the last interval, so they belong to none.
    """
    scratch = StepRecorder(None, device_clock)
    costs_s = []
    for number in range(rounds):
        begun = perf_counter()
        scratch.fetched(perf_counter(), grad=True)
        scratch.stepped()
        scratch.boundary(number)
        costs_s.append(perf_counter() - begun)
    return sorted(costs_s)[rounds // 2]
