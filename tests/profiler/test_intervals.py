"""Intervals that contain the truth as often as they say, of values that depend on each other, too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy

from gpuslice.profiler.intervals import CONFIDENCE, correlation_time, median_interval
from gpuslice.sched_core import interference

RUNS = 1000
#: Of so many 99 % intervals: 990, less three standard deviations of a binomial distribution.
INSIDE = 980


def test_all_intervals_are_of_one_level() -> None:
    assert interference.CONFIDENCE == CONFIDENCE


def smoothed(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Each value keeps ``share`` of the deviation of the one before (an autoregression)."""

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        found: np.ndarray = scipy.signal.lfilter([1.0], [1.0, -share], random.standard_normal(count + 200))
        return found[200:]

    return draw


def gamma(random: np.random.Generator, count: int) -> np.ndarray:
    """Step times with a long tail, as real ones have; the median is known to six digits."""
    return random.gamma(2.0, 1.0, count) - 1.678347


def grouped(random: np.random.Generator, count: int) -> np.ndarray:
    """Slow and fast steps in groups of ten on average: a neighbour that comes and goes."""
    slow = np.cumsum(random.random(count) < 0.1) % 2
    return random.standard_normal(count) + 2.0 * (slow if random.random() < 0.5 else 1 - slow) - 1.0


@pytest.mark.parametrize("count", [8, 30, 300])
def test_the_interval_of_a_median_of_steps_with_a_long_tail(count: int) -> None:
    random = np.random.default_rng(count)
    found = [median_interval(gamma(random, count)) for _ in range(RUNS)]
    known = [one for one in found if one is not None]
    assert len(known) > (0.95 if count > 8 else 0.3) * RUNS
    assert sum(low <= 0.0 <= high for low, high in known) >= INSIDE / RUNS * len(known)


@pytest.mark.parametrize("draw", [smoothed(0.5), smoothed(0.9), grouped])
@pytest.mark.parametrize("count", [300, 2000])
def test_the_interval_of_a_median_of_steps_that_depend_on_each_other(
    draw: Callable[[np.random.Generator, int], np.ndarray], count: int
) -> None:
    random = np.random.default_rng(count)
    found = [median_interval(draw(random, count)) for _ in range(300_000 // count)]
    known = [one for one in found if one is not None]
    assert len(known) > 0.9 * len(found)
    assert sum(low <= 0.0 <= high for low, high in known) >= 0.95 * len(known)


def test_equal_values_have_no_width() -> None:
    assert median_interval(np.full(20, 3.0)) == (3.0, 3.0)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_too_few_values_have_no_interval(count: int) -> None:
    assert median_interval(np.arange(float(count))) is None


def test_the_correlation_time_of_an_autoregression() -> None:
    values = smoothed(0.8)(np.random.default_rng(3), 100_000)
    assert correlation_time(values) == pytest.approx((1 + 0.8) / (1 - 0.8), rel=0.1)
    assert correlation_time(np.random.default_rng(4).standard_normal(100_000)) == pytest.approx(1.0, abs=0.02)
