"""One trial: jobs that ran together, and the speed of each while all of them trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise

import msgspec
import numpy as np

from gpuslice.profiler.memory import MemoryUse
from gpuslice.profiler.recorder import Recording
from gpuslice.profiler.steps import warmup

from .plan import Members, Mode, Task
from .spans import Column, Span, active, intersection, progress, total_s, without
from .stress import Stressed, step_edges

#: Number of quantiles kept of the step times.
_QUANTILES = 101


class Window(msgspec.Struct, frozen=True):
    """A part of a trial in which a member trained with the others, and alone.

    Attributes
    ----------
    steps, seconds
        Steps made with the others, and the seconds they took.
    alone_steps, alone_seconds
        The same while the others stood still.
    """

    steps: float
    seconds: float
    alone_steps: float
    alone_seconds: float

    @property
    def normalized(self) -> float | None:
        """Throughput with the others by throughput alone; None if either was not measured."""
        if not self.seconds or not self.alone_steps:
            return None
        return self.steps / self.seconds / (self.alone_steps / self.alone_seconds)


class Run(msgspec.Struct, frozen=True):
    """The measurements of one member of a trial.

    Attributes
    ----------
    steps
        Steps made while all members trained; steps at the ends count in part.
    seconds
        How long all members trained at the same time, warm-ups excluded.
    starts
        How often the script was started; it is again when it ends early.
    memory_bytes
        The most that it held, ``None`` if its device does not tell.
    step_seconds
        101 evenly spaced quantiles of the step times, from the least to the greatest; empty without any.
    alone_steps, alone_seconds
        Steps that it made in the same trial while the others stood still, and how long that was; 0 where that
        was not measured.
    windows
        Parts of the trial, in order of time, the same ones for all members: in each of them every member was
        alone once, or had a turn. Empty if no member was alone.
    """

    steps: float
    seconds: float
    starts: int
    memory_bytes: int | None
    step_seconds: tuple[float, ...]
    alone_steps: float = 0.0
    alone_seconds: float = 0.0
    windows: tuple[Window, ...] = ()

    @property
    def steps_per_second(self) -> float:
        """Throughput; 0 if nothing was measured."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def alone_steps_per_second(self) -> float:
        """Throughput while the others stood still; 0 if nothing was measured."""
        return self.alone_steps / self.alone_seconds if self.alone_seconds else 0.0


class Trial(msgspec.Struct, frozen=True):
    """Measurements of a set in one round.

    Attributes
    ----------
    round
        From 0.
    members
        Numbers of the jobs.
    mode
        How they shared the device.
    wall_s
        Duration of the whole trial, with starting and ending the scripts.
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
        """The task of the plan that this trial measured."""
        return Task(self.round, self.members, self.mode)


def measure(
    recordings: Sequence[Sequence[Recording]], halts: Sequence[Sequence[Span]] = ()
) -> tuple[Run, ...]:
    """Return the speed of each member while all of them trained, and while the others stood still.

    Parameters
    ----------
    recordings
        For each member the recordings of its starts, in order.
    halts
        For each member when it was stopped, so that another one was alone; empty if none was.
    """
    halted = list(halts) or [()] * len(recordings)
    members = [_Member(starts, stops) for starts, stops in zip(recordings, halted, strict=True)]
    common = reduce(intersection, [member.spans for member in members])
    alone = [_alone(number, members, halted) for number in range(len(members))]
    ends_s = _rotation_ends(halted)
    return tuple(
        Run(
            steps=member.steps(common),
            seconds=total_s(common),
            starts=len(starts),
            memory_bytes=_most([held_bytes(one) for one in starts]),
            step_seconds=_quantiles(member.step_seconds(common)),
            alone_steps=member.steps(own),
            alone_seconds=total_s(own),
            windows=tuple(_windows(member, common, own, ends_s)),
        )
        for member, own, starts in zip(members, alone, recordings, strict=True)
    )


def _alone(number: int, members: Sequence[_Member], halted: Sequence[Sequence[Span]]) -> list[Span]:
    """Return the times when a member trained while all others were stopped."""
    others = [stops for other, stops in enumerate(halted) if other != number]
    return reduce(intersection, others, members[number].spans) if others else []


def _windows(
    member: _Member, common: Sequence[Span], own: Sequence[Span], ends_s: Sequence[float]
) -> Iterator[Window]:
    """Yield the progress of ``member`` in the windows that end at ``ends_s``."""
    for window in pairwise([-np.inf, *ends_s]):
        together, alone = intersection(common, [window]), intersection(own, [window])
        yield Window(member.steps(together), total_s(together), member.steps(alone), total_s(alone))


def _rotation_ends(halted: Sequence[Sequence[Span]]) -> list[float]:
    """Return the times at which each member had been alone once more; the last member is alone last.

    The first member is stopped while each of the others is alone.
    """
    others = len(halted) - 1
    return [end for _, end in halted[0][others - 1 :: others]] if others else []


class _Member:
    """A member's steps after its warm-up, on a clock that stops while the member is halted."""

    def __init__(self, recordings: Sequence[Recording], halts: Sequence[Span]) -> None:
        self._halts = halts
        self._edges = []
        self.spans: list[Span] = []
        for recording in recordings:
            edges = step_edges(recording)
            if edges.size > 1:
                own = active(edges, halts)
                begun = warmup(np.diff(own))
                self._edges.append(own[begun:])
                self.spans += without([(edges[begun], edges[-1])], halts)

    def steps(self, spans: Sequence[Span]) -> float:
        own = active(spans, self._halts)
        return float(sum(progress(edges, own) for edges in self._edges))

    def step_seconds(self, spans: Sequence[Span]) -> Column:
        own = [(begin, end) for begin, end in active(spans, self._halts).reshape(-1, 2)]
        return np.concatenate([_inside(edges, own) for edges in self._edges] or [np.empty(0)])


def measure_turns(
    recordings: Sequence[Sequence[Recording]], cycles: Sequence[Sequence[Span]]
) -> tuple[Run, ...]:
    """Return the speed of each member while all took turns: one trained, the others were suspended.

    Parameters
    ----------
    recordings
        For each member the recordings of its starts, in order.
    cycles
        For each cycle the turns of all members, in order. Other members' turns and the switches count as
        time. Steps that lie in a turn completely give the step times; those in its second half tell how fast
        the member is alone: right after a resume, caches are cold.
    """
    members = [[step_edges(recording) for recording in starts] for starts in recordings]
    found = []
    for number, (starts, recorded) in enumerate(zip(members, recordings, strict=True)):
        windows = tuple(_cycle(starts, turns, number) for turns in cycles)
        steps_s = np.concatenate([_within(edges, [turns[number] for turns in cycles]) for edges in starts])
        found.append(
            Run(
                steps=sum(one.steps for one in windows),
                seconds=sum(one.seconds for one in windows),
                starts=len(starts),
                memory_bytes=_most([held_bytes(one) for one in recorded]),
                step_seconds=_quantiles(steps_s),
                alone_steps=sum(one.alone_steps for one in windows),
                alone_seconds=sum(one.alone_seconds for one in windows),
                windows=windows,
            )
        )
    return tuple(found)


def _cycle(starts: Sequence[Column], turns: Sequence[Span], number: int) -> Window:
    """Return a member's progress in one cycle: in all of it, and in the second half of its own turn."""
    whole = (turns[0][0], turns[-1][1])
    begin, end = turns[number]
    late_s = np.concatenate([_within(edges, [((begin + end) / 2, end)]) for edges in starts])
    steps = float(sum(progress(edges, [whole]) for edges in starts))
    return Window(steps, whole[1] - whole[0], float(late_s.size), float(late_s.sum()))


def held_bytes(recording: Recording) -> int | None:
    """Return the most memory that a process held on its device.

    On the host the peak contains the process's libraries. On a GPU the CUDA context is added to the tensors.
    """
    memory: MemoryUse | None = recording.memory
    if memory is None or memory.peak_bytes is None:
        return None
    return memory.peak_bytes + (memory.context_bytes or 0 if recording.clock == "cuda" else 0)


def _inside(edges: Column, common: Sequence[Span]) -> Column:
    """Return the times of the steps whose middle lies in ``common``."""
    steps_s, middles = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    inside = np.zeros(steps_s.shape, dtype=bool)
    for begin, end in common:
        inside |= (begin <= middles) & (middles <= end)
    return steps_s[inside]


def _within(edges: Column, spans: Sequence[Span]) -> Column:
    """Return the times of the steps that lie completely in one of ``spans``."""
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
