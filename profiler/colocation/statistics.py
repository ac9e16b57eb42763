"""Means over rounds with confidence intervals, from the rounds and from windows within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, hypot, sqrt

import msgspec
import numpy as np
import scipy

from gpuslice.profiler.intervals import CONFIDENCE, Interval, correlation_time


class Estimate(msgspec.Struct, frozen=True):
    """A mean over rounds.

    Attributes
    ----------
    mean
        Mean of the rounds.
    interval
        At the level ``CONFIDENCE``; None if too little was measured for one.
    error
        Standard error of the mean; None without an interval.
    """

    mean: float
    interval: Interval | None
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one quantity: by round, and by window within the rounds.

    Attributes
    ----------
    rounds
        One value for each round, shape (rounds,).
    windows
        Values of windows within the rounds, in order of time; empty if there are none.
    """

    rounds: Sequence[float]
    windows: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class _Error:
    """A standard error and its degrees of freedom."""

    value: float
    freedom: int

    def around(self, mean: float) -> Estimate:
        """Return the estimate of ``mean``. Its interval never goes below 0."""
        half_width = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, self.freedom)) * self.value
        return Estimate(mean, (max(0.0, mean - half_width), mean + half_width), self.value)


def estimate(samples: Samples) -> Estimate:
    """Return the mean of the rounds with its interval.

    Without windows the interval is Student's over the rounds. Windows give it more degrees of freedom: each
    counts as a sample, fewer if neighbours are alike (``correlation_time``), and never more than half of
    them. The standard error is the larger one of that between windows and that between rounds, so that a
    machine that changes from round to round widens the interval.
    """
    mean, error = float(np.mean(samples.rounds)), _error(samples)
    return Estimate(mean, None) if error is None else error.around(mean)


def quotient(values: Sequence[float], upper: Samples, lower: Samples | None) -> Estimate:
    """Return the mean of ``values``, shape (rounds,), which are ``upper`` by ``lower`` in each round.

    Relative errors of both add up in squares. Their difference between rounds counts if it is larger than
    that. ``lower`` is None if it is assumed and has no error.
    """
    mean, parts = float(np.mean(values)), [_relative(one) for one in (upper, lower) if one is not None]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return Estimate(mean, None)
    relative = hypot(*(part.value for part in known))
    value = max(mean * relative, _spread(values) if len(values) > 1 else 0.0)
    return _Error(value, min(part.freedom for part in known)).around(mean)


def _relative(samples: Samples) -> _Error | None:
    error, mean = _error(samples), float(np.mean(samples.rounds))
    return None if error is None or mean <= 0 else _Error(error.value / mean, error.freedom)


def _error(samples: Samples) -> _Error | None:
    """Return the standard error of the mean, or None if too little was measured."""
    rounds = len(samples.rounds)
    between = _Error(_spread(samples.rounds), rounds - 1) if rounds > 1 else None
    count = len(samples.windows)
    if count < 2:
        return between
    windows = np.asarray(samples.windows, dtype=np.float64)
    independent = count / correlation_time(windows)
    freedom = min(floor(independent) - 1, count // 2)
    if freedom < 1:
        return between
    within = float(np.std(windows, ddof=1)) / sqrt(independent)
    if between is None:
        return _Error(within, freedom)
    return _Error(max(within, between.value), max(freedom, between.freedom))


def _spread(values: Sequence[float]) -> float:
    return float(scipy.stats.sem(values))
