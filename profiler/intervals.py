"""Confidence intervals of medians, of one level everywhere."""

from __future__ import annotations

from math import floor

import numpy as np
import scipy
from numpy.typing import NDArray

#: Level of every stated interval. The live packing estimator (``sched_core``) decides at the same level.
CONFIDENCE = 0.99
Interval = tuple[float, float]


def median_interval(values: NDArray[np.float64]) -> Interval | None:
    """Return a confidence interval of the median of ``values``, shape (n,), in order of measurement.

    It lies between two of the values: the number of independent values above the median follows a binomial
    distribution, whatever the distribution of the values (Conover, Practical Nonparametric Statistics,
    section 3.2). Neighbours that are alike count as fewer values, see `correlation_time`.

    Returns
    -------
    ``None`` with fewer than eight independent values: then no two of them hold the median so surely.
    """
    if not len(values):
        return None
    above = np.sign(values - np.median(values))
    independent = floor(len(values) / correlation_time(above))
    rank = int(scipy.stats.binom.ppf((1 - CONFIDENCE) / 2, independent, 0.5))
    if rank < 1:
        return None
    ordered = np.sort(values)
    rank = rank * len(values) // independent
    return float(ordered[rank - 1]), float(ordered[-rank])


def correlation_time(values: NDArray[np.float64]) -> float:
    """Return how many successive ``values`` tell as much about their mean as one independent value.

    At least 1. It is the sum of the autocorrelations, as long as those of two successive lags are positive
    together (the initial positive sequence, Geyer, Statistical Science 7, 1992).
    """
    spread = values - values.mean()
    count = len(values)
    products = scipy.signal.correlate(spread, spread, method="auto")[count - 1 :]
    if products[0] <= 0:
        return 1.0
    pairs = (products[: count // 2 * 2] / products[0]).reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pairs <= 0)
    return max(1.0, float(2 * pairs[: negative[0] if negative.size else None].sum() - 1))
