"""Intervals that contain the truth as often as they say, and verdicts that follow from them."""

from __future__ import annotations

import pytest

from gpuslice.profiler.colocation.statistics import Estimate, estimate
from gpuslice.profiler.colocation.verdict import judge


def test_the_interval_is_students() -> None:
    found = estimate([0.4, 0.5, 0.6])
    assert found.mean == pytest.approx(0.5)
    # 9.925: the quantile of two degrees of freedom, from the tables. No throughput is below 0.
    assert found.interval == pytest.approx((0.0, 0.5 + 9.925 * 0.1 / 3**0.5), rel=1e-3)


def test_one_round_has_no_interval() -> None:
    assert estimate([0.5]) == Estimate(0.5, None)


def test_no_throughput_is_below_nothing() -> None:
    interval = estimate([0.1, 0.9]).interval
    assert interval is not None
    assert interval[0] == 0.0


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
    assert judge([certain(one) for one in members], shares, certain(sum(members))) == verdict


def test_a_share_is_what_a_turn_really_gives() -> None:
    members = [certain(0.99), certain(0.45)]
    assert judge(members, [0.5, 0.5], certain(1.44)) == "separate"
    assert judge(members, [0.45, 0.42], certain(1.44)) == "pack"


def test_no_verdict_without_an_interval() -> None:
    assert judge([Estimate(0.9, None)] * 2, [0.5, 0.5], Estimate(1.8, None)) is None
