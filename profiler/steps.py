"""Step times from a recording: which intervals are warm-up, steps or other phases, and how long they are.

docs/measure.md has the rules. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from math import ceil, exp, sqrt

import msgspec
import numpy as np
import scipy
from numpy.typing import NDArray

from .intervals import CONFIDENCE, Interval, median_interval
from .recorder import Recording

Column = NDArray[np.float64]

#: Number of steps whose median must be near the settled one at the end of the warm-up.
_WINDOW = 5
#: "Near": within this share of it, or this many robust standard deviations.
_NEAR, _NEAR_SIGMAS = 0.05, 3.0
#: An interval that is longer than usual by both of these is looked at more closely.
_LONG, _LONG_SIGMAS = 0.5, 6.0
#: A median absolute deviation times this estimates the standard deviation of a normal distribution.
_SIGMA = 1.4826
#: For a change: the least steps on either side, the least relative difference, and the chance of finding one
#: where there is none.
_LEAST_STEPS, _LEAST_CHANGE, _SIGNIFICANCE = 15, 0.05, 0.01


class Kind(Enum):
    """The kind of an interval between two boundaries."""

    WARMUP = "warmup"
    STEP = "step"
    EVALUATION = "evaluation"
    DATA_STALL = "data_stall"
    PAUSE = "pause"


class StepSeconds(msgspec.Struct, frozen=True):
    """Quantiles over all steps, in seconds.

    Attributes
    ----------
    interval
        Confidence interval of the median; ``None`` with too few independent steps.
    confidence
        Its level.
    jitter
        ``(p90 - p10) / median``.
    """

    median: float
    p10: float
    p90: float
    interval: Interval | None
    confidence: float
    jitter: float


class Phase(msgspec.Struct, frozen=True):
    """Intervals of one kind that are no steps: how many, and their seconds together."""

    count: int
    seconds: float


class Change(msgspec.Struct, frozen=True):
    """A lasting change of the step time at ``step``, from 0 after the warm-up; medians before and after."""

    step: int
    before_seconds: float
    after_seconds: float


class StepTimes(msgspec.Struct, frozen=True):
    """The step times of one rank.

    Attributes
    ----------
    steps
        How many intervals count as steps.
    step_seconds
        ``None`` without any.
    clock
        ``monotonic`` or ``cuda``.
    phases
        What else there was, by the names of ``Kind``.
    changes
        Where the level of the step times changed.
    overhead
        The part of the recorded time that recording took.
    data_share
        The part of the steps' time in which the script waited for batches; ``None`` without steps.
    cpu_cores
        How many cores the process kept busy, on average over all that was recorded.
    """

    steps: int
    step_seconds: StepSeconds | None
    warmup_steps: int
    clock: str
    phases: dict[str, Phase]
    changes: tuple[Change, ...]
    overhead: float
    data_share: float | None
    cpu_cores: float


def analyse(recording: Recording) -> StepTimes:
    """Return the step times of ``recording``."""
    intervals_s = np.array(recording.interval_s)
    kinds = classify(recording)
    steps_s = intervals_s[kinds == Kind.STEP]
    others = [kind for kind in Kind if kind not in (Kind.STEP, Kind.WARMUP)]
    return StepTimes(
        steps=len(steps_s),
        step_seconds=_seconds(steps_s),
        warmup_steps=int((kinds == Kind.WARMUP).sum()),
        clock=recording.clock,
        phases={
            kind.value: Phase(int((kinds == kind).sum()), float(intervals_s[kinds == kind].sum()))
            for kind in others
        },
        changes=tuple(changes(steps_s)),
        overhead=recording.recorder_s / recording.total_s if recording.total_s else 0.0,
        data_share=_share(np.array(recording.fetching_s)[kinds == Kind.STEP], steps_s),
        cpu_cores=recording.cpu_s / recording.total_s if recording.total_s else 0.0,
    )


def classify(recording: Recording) -> NDArray[np.object_]:
    """Return the ``Kind`` of every interval of ``recording``, shape (intervals,)."""
    intervals_s = np.array(recording.interval_s)
    kinds = np.full(intervals_s.shape, Kind.STEP, dtype=object)
    if not intervals_s.size:
        return kinds
    begun = warmup(intervals_s)
    batches, fetching_s = np.array(recording.batches), np.array(recording.fetching_s)
    after_s = np.array(recording.after_step_s)
    settled = slice(begun, None)
    evaluation = (np.array(recording.without_grad) > 0) | (batches > 2 * np.median(batches[settled]))
    # The cause of a long interval is the part that exceeds its own usual length most.
    parts = np.stack([fetching_s, after_s, intervals_s - fetching_s - after_s])
    usual_s = np.median(parts[:, settled], axis=1, keepdims=True)
    longest_part = np.argmax(parts - usual_s, axis=0)
    long = intervals_s > _limit_s(intervals_s[settled])
    kinds[long & (longest_part == 0)] = Kind.DATA_STALL
    kinds[long & (longest_part == 1)] = Kind.PAUSE
    kinds[evaluation] = Kind.EVALUATION
    kinds[:begun] = Kind.WARMUP
    return kinds


def warmup(intervals_s: Column) -> int:
    """Return how many intervals at the beginning are warm-up: at least one, at most half.

    The warm-up ends where the median of five intervals is first near that of the second half, and the first
    of the five is no longer than that. The median alone would let two slow intervals pass.
    """
    half = len(intervals_s) // 2
    settled = intervals_s[half:]
    level_s = np.median(settled)
    near_s = max(_NEAR * level_s, _NEAR_SIGMAS * _deviation(settled))
    for first in range(1, half):
        slow = intervals_s[first] > level_s + near_s
        if not slow and abs(np.median(intervals_s[first : first + _WINDOW]) - level_s) <= near_s:
            return first
    return half


def changes(steps_s: Column) -> list[Change]:
    """Return where the level of ``steps_s`` changes for good.

    Pettitt's test (Applied Statistics 28, 1979) uses ranks, so outliers do not matter. It is made in windows
    of many lengths (seeded binary segmentation, Kovács et al., Biometrika 110, 2023); the shortest ones that
    show a change count.
    """
    windows = sorted(_windows(len(steps_s)), key=lambda window: window[1] - window[0])
    found: list[int] = []
    for start, stop in windows:
        if any(start < at < stop for at in found):
            continue
        at = _change(steps_s[start:stop], _SIGNIFICANCE / len(windows))
        if at is not None:
            found.append(start + at)
    bounds = [0, *sorted(found), len(steps_s)]
    medians_s = [float(np.median(steps_s[a:b])) for a, b in pairwise(bounds) if a < b]
    return [
        Change(step, before_s, after_s)
        for step, before_s, after_s in zip(sorted(found), medians_s, medians_s[1:], strict=False)
    ]


def _windows(count: int) -> Iterator[tuple[int, int]]:
    """Yield windows of ever smaller lengths, each overlapping the next by half."""
    length = float(count)
    while length >= 2 * _LEAST_STEPS:
        pieces = 2 * ceil(count / length) - 1
        for piece in range(pieces):
            start = round(piece * (count - length) / max(1, pieces - 1))
            yield start, min(count, start + ceil(length))
        length /= sqrt(2)


def _change(steps_s: Column, significance: float) -> int | None:
    """Return after how many of ``steps_s`` their level changes; None if it does not."""
    count = len(steps_s)
    # U after k steps: 2 * (sum of their ranks) - k * (count + 1).
    ranks = np.cumsum(scipy.stats.rankdata(steps_s))
    distance = np.abs(2 * ranks - np.arange(1, count + 1) * (count + 1))
    inner = distance[_LEAST_STEPS - 1 : count - _LEAST_STEPS]
    at = int(np.argmax(inner)) + _LEAST_STEPS
    p_value = 2 * exp(-6.0 * float(inner.max()) ** 2 / (count**3 + count**2))
    before_s, after_s = np.median(steps_s[:at]), np.median(steps_s[at:])
    different = abs(after_s - before_s) >= _LEAST_CHANGE * before_s
    return at if different and p_value <= significance else None


def _share(parts_s: Column, steps_s: Column) -> float | None:
    return float(parts_s.sum() / steps_s.sum()) if steps_s.sum() else None


def _seconds(steps_s: Column) -> StepSeconds | None:
    if not steps_s.size:
        return None
    p10, median, p90 = (float(value) for value in np.quantile(steps_s, [0.1, 0.5, 0.9]))
    jitter = (p90 - p10) / median if median else 0.0
    return StepSeconds(median, p10, p90, median_interval(steps_s), CONFIDENCE, jitter)


def _limit_s(intervals_s: Column) -> float:
    """Return the length in seconds beyond which an interval is unusual."""
    level_s = float(np.median(intervals_s))
    return level_s + max(_LONG * level_s, _LONG_SIGMAS * _deviation(intervals_s))


def _deviation(values: Column) -> float:
    """Return a standard deviation that is robust against outliers (by the median absolute deviation)."""
    return float(_SIGMA * np.median(np.abs(values - np.median(values))))
