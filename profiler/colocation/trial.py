"""One trial: jobs that ran together, and how fast each was while all of them trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuslice.profiler.memory import MemoryUse
from gpuslice.profiler.recorder import Recording
from gpuslice.profiler.steps import warmup

from .plan import Members, Mode, Task
from .stress import Stressed

Column = NDArray[np.float64]
Span = tuple[float, float]

#: Step times are kept as so many quantiles.
_QUANTILES = 101


class Run(msgspec.Struct, frozen=True):
    """One member of a trial.

    Attributes
    ----------
    steps
        Those made while all members trained; parts of steps at the ends count as such.
    seconds
        How long all members trained at the same time, warm-ups excluded.
    starts
        How often the script was started; it is again when it ends early.
    memory_bytes
        The most that it held, ``None`` if its device does not tell.
    step_seconds
        101 evenly spaced quantiles of the step times, from the least to the greatest; empty without any.
    """

    steps: float
    seconds: float
    starts: int
    memory_bytes: int | None
    step_seconds: tuple[float, ...]

    @property
    def steps_per_second(self) -> float:
        """Its throughput; 0 if nothing was measured."""
        return self.steps / self.seconds if self.seconds else 0.0


class Trial(msgspec.Struct, frozen=True):
    """What was measured of a set in one round.

    Attributes
    ----------
    round
        From 0.
    members
        Numbers of the jobs.
    mode
        How they shared the device.
    wall_s
        What it took in all, with starting and ending the scripts.
    runs
        One for each member; none if it could not be measured, and none beside our own loads.
    stressed
        What our own loads did, and what was done to them.
    """

    round: int
    members: Members
    mode: Mode
    wall_s: float
    runs: tuple[Run, ...]
    stressed: tuple[Stressed, ...] = ()

    @property
    def task(self) -> Task:
        """Which one of the plan it was."""
        return Task(self.round, self.members, self.mode)


def measure(recordings: Sequence[Sequence[Recording]]) -> tuple[Run, ...]:
    """How fast each member was while all of them trained.

    Parameters
    ----------
    recordings
        For each member those of its starts, in order.
    """
    members = [[_settled(recording) for recording in starts] for starts in recordings]
    spans = [[(edges[0], edges[-1]) for edges in starts if edges.size > 1] for starts in members]
    common = reduce(intersection, spans)
    seconds = float(sum(end - begin for begin, end in common))
    return tuple(
        Run(
            steps=float(sum(_steps(edges, common) for edges in starts)),
            seconds=seconds,
            starts=len(starts),
            memory_bytes=_most([held_bytes(one) for one in recorded]),
            step_seconds=_quantiles(np.concatenate([_inside(edges, common) for edges in starts])),
        )
        for starts, recorded in zip(members, recordings, strict=True)
    )


def measure_turns(
    recordings: Sequence[Sequence[Recording]], cycles: Sequence[Sequence[Span]]
) -> tuple[Run, ...]:
    """How fast each member was while all took turns: one trained, the others were suspended.

    Parameters
    ----------
    recordings
        For each member those of its starts, in order.
    cycles
        For each cycle the turns of all members, in order. Other members' turns and the switches count as
        time. Steps that lie in a turn completely give the step times.
    """
    members = [[_edges(recording) for recording in starts] for starts in recordings]
    whole = [(turns[0][0], turns[-1][1]) for turns in cycles]
    seconds = float(sum(end - begin for begin, end in whole))
    return tuple(
        Run(
            steps=float(sum(_steps(edges, whole) for edges in starts)),
            seconds=seconds,
            starts=len(starts),
            memory_bytes=_most([held_bytes(one) for one in recorded]),
            step_seconds=_quantiles(
                np.concatenate([_within(edges, [turns[number] for turns in cycles]) for edges in starts])
            ),
        )
        for number, (starts, recorded) in enumerate(zip(members, recordings, strict=True))
    )


def intersection(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """The times that lie in a span of either list."""
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other]
    return sorted((begin, end) for begin, end in both if begin < end)


def held_bytes(recording: Recording) -> int | None:
    """The most memory that a process held on its device.

    On the host the peak contains the process's libraries; on a GPU its context lies beyond the tensors.
    """
    memory: MemoryUse | None = recording.memory
    if memory is None or memory.peak_bytes is None:
        return None
    return memory.peak_bytes + (memory.context_bytes or 0 if recording.clock == "cuda" else 0)


def _edges(recording: Recording) -> Column:
    """When the steps end, and when the first of them begins, on the host's clock."""
    intervals_s = np.array(recording.interval_s, dtype=np.float64)
    if not intervals_s.size:
        return np.empty(0)
    edges: Column = recording.begun_s + np.concatenate([[0.0], np.cumsum(intervals_s)])
    return edges


def _settled(recording: Recording) -> Column:
    """The same after the warm-up."""
    edges = _edges(recording)
    return edges[warmup(np.diff(edges)) :] if edges.size else edges


def _steps(edges: Column, common: Sequence[Span]) -> float:
    if edges.size < 2:
        return 0.0
    counts = np.interp(np.array(common).reshape(-1, 2), edges, np.arange(edges.size))
    return float((counts[:, 1] - counts[:, 0]).sum())


def _inside(edges: Column, common: Sequence[Span]) -> Column:
    """The times of the steps whose middle lies in ``common``."""
    steps_s, middles = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    inside = np.zeros(steps_s.shape, dtype=bool)
    for begin, end in common:
        inside |= (begin <= middles) & (middles <= end)
    return steps_s[inside]


def _within(edges: Column, spans: Sequence[Span]) -> Column:
    """The times of the steps that lie in one of ``spans`` completely."""
    inside = np.zeros(max(0, edges.size - 1), dtype=bool)
    for begin, end in spans:
        inside |= (begin <= edges[:-1]) & (edges[1:] <= end)
    return np.diff(edges)[inside]


def _quantiles(steps_s: Column) -> tuple[float, ...]:
    if not steps_s.size:
        return ()
    return tuple(float(value) for value in np.quantile(steps_s, np.linspace(0.0, 1.0, _QUANTILES)))


def _most(sizes: Sequence[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
