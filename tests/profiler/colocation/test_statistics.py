"""Intervals that contain the truth as often as they say, and verdicts that follow from them."""

from __future__ import annotations

import numpy as np
import pytest

from gpuslice.profiler.colocation.statistics import Estimate, Samples, estimate, quotient
from gpuslice.profiler.colocation.verdict import Verdict, judge

RUNS = 400


def test_without_windows_the_interval_is_students() -> None:
    found = estimate(Samples([0.4, 0.5, 0.6]))
    assert found.mean == pytest.approx(0.5)
    # 9.925: the quantile of two degrees of freedom, from the tables. No throughput is below 0.
    assert found.interval == pytest.approx((0.0, 0.5 + 9.925 * 0.1 / 3**0.5), rel=1e-3)


def test_one_round_without_windows_has_no_interval() -> None:
    assert estimate(Samples([0.5])) == Estimate(0.5, None)
    assert quotient([0.5], Samples([0.5]), Samples([1.0])) == Estimate(0.5, None)


def test_no_throughput_is_below_nothing() -> None:
    interval = estimate(Samples([0.1, 0.9])).interval
    assert interval is not None
    assert interval[0] == 0.0


def drawn(
    random: np.random.Generator, rounds: int, windows: int, between: float = 0.0, mean: float = 1.0
) -> Samples:
    """Return windows with a deviation of 0.1, in rounds that differ by ``between`` of a round's error."""
    shifts = random.normal(0.0, between * 0.1 / windows**0.5, (rounds, 1))
    values = mean + random.normal(0.0, 0.1, (rounds, windows)) + shifts
    return Samples(list(values.mean(axis=1)), list(values.ravel()))


@pytest.mark.parametrize(("between", "good"), [(0.0, 0.98), (1.0, 0.96), (2.0, 0.92)])
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_intervals_from_windows_contain_the_truth(rounds: int, between: float, good: float) -> None:
    if rounds == 1 and between:
        pytest.skip("one round does not show how much rounds differ")
    random = np.random.default_rng(rounds)
    intervals = [estimate(drawn(random, rounds, 4, between)).interval for _ in range(RUNS)]
    known = [interval for interval in intervals if interval is not None]
    assert len(known) > 0.9 * RUNS
    assert sum(low <= 1.0 <= high for low, high in known) >= good * len(known)


def test_the_interval_of_a_quotient_contains_the_truth() -> None:
    random = np.random.default_rng(4)
    inside = 0
    for _ in range(RUNS):
        upper, lower = drawn(random, 2, 8, mean=1.8), drawn(random, 2, 4, mean=0.9)
        values = [one / other for one, other in zip(upper.rounds, lower.rounds, strict=True)]
        interval = quotient(values, upper, lower).interval
        inside += interval is None or interval[0] <= 2.0 <= interval[1]
    assert inside >= 0.97 * RUNS


def test_a_difference_between_rounds_widens_the_interval() -> None:
    steady = estimate(Samples([1.0, 1.0], [0.99, 1.01] * 4)).interval
    drifted = estimate(Samples([0.8, 1.2], [0.79, 0.81] * 2 + [1.19, 1.21] * 2)).interval
    assert steady is not None
    assert drifted is not None
    assert steady[1] - steady[0] < 0.05
    assert drifted[1] - drifted[0] > 1.0


def certain(mean: float) -> Estimate:
    return Estimate(mean, (mean - 0.02, mean + 0.02))


@pytest.mark.parametrize(
    ("members", "verdict"),
    [
        ((0.95, 0.98), "pack"),
        ((0.49, 0.50), "slice"),
        ((0.505, 0.505), "slice"),  # the interval contains 1
        ((0.99, 0.30), "separate"),
        ((0.99, 0.49), "pack"),  # may be its share
        ((0.5, 0.5, 0.5), "pack"),
        ((0.2, 0.2, 0.2), "slice"),
    ],
)
def test_verdicts(members: tuple[float, ...], verdict: str) -> None:
    shares = [1 / len(members)] * len(members)
    found = judge([certain(one) for one in members], shares, certain(sum(members)), 3)
    assert found == Verdict(verdict)  # type: ignore[arg-type]


def test_a_share_is_what_a_turn_really_gives() -> None:
    members = [certain(0.99), certain(0.45)]
    assert judge(members, [0.5, 0.5], certain(1.44), 3).name == "separate"
    assert judge(members, [0.45, 0.42], certain(1.44), 3).name == "pack"


def test_without_an_interval_nothing_is_decided() -> None:
    found = judge([Estimate(0.9, None)] * 2, [0.5, 0.5], Estimate(1.8, None), 1)
    assert found == Verdict("undecided", 1)


@pytest.mark.parametrize(
    ("gain", "half_width", "more"),
    [(1.2, 0.39, 6), (1.2, 0.21, 1), (1.025, 0.1, 30), (0.9, 0.16, 1)],
)
def test_what_is_undecided_says_how_many_rounds_more_would_decide(
    gain: float, half_width: float, more: int
) -> None:
    found = judge(
        [certain(gain / 2)] * 2, [0.5, 0.5], Estimate(gain, (gain - half_width, gain + half_width)), 2
    )
    assert found == Verdict("undecided", more)
