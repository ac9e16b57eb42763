"""Means over rounds with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A mean over rounds; ``interval`` is ``None`` after a single one."""

    mean: float
    interval: tuple[float, float] | None


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of ``values``, shape (rounds,), with Student's 95 % interval; none of it lies below 0.

    Rounds are independent of each other, steps of one run are not: so the spread between rounds is what
    counts, and few rounds make a wide interval.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, None)
    error = float(stats.sem(values))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return Estimate(mean, (max(0.0, mean - reach), mean + reach))
