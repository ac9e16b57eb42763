"""Means over rounds with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from gpuslice.profiler.intervals import Interval, mean_interval


class Estimate(msgspec.Struct, frozen=True):
    """A mean over rounds; ``interval`` is ``None`` after a single one."""

    mean: float
    interval: Interval | None


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of ``values``, shape (rounds,), with its interval; none of it lies below 0.

    Rounds are independent of each other, steps of one run are not: so the spread between rounds is what
    counts, and few rounds make a wide interval.
    """
    found = mean_interval(values)
    return Estimate(float(np.mean(values)), None if found is None else (max(0.0, found[0]), found[1]))
