"""Curves through losses and speeds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.sched_core.policies.curves import LossCurve, LossHistory, fit_loss, fit_losses
from gpuslice.sched_core.speedup import SpeedCurve


@given(st.floats(0.001, 0.1), st.floats(0.5, 2.0), st.floats(0.0, 0.5))
@settings(max_examples=60, deadline=None)
def test_a_curve_is_found_again(slope: float, start: float, floor: float) -> None:
    truth = LossCurve(slope, start, floor)
    found = fit_loss([(float(k), truth.at(k)) for k in range(0, 2000, 100)])
    assert found is not None
    for k in (0, 500, 1999, 4000):
        assert found.at(k) == pytest.approx(truth.at(k), rel=0.01, abs=1e-3)


def test_the_end_is_where_the_share_is_left() -> None:
    curve = LossCurve(0.09, 1.0, 0.0)
    assert curve.ends_at_s(0.1) == pytest.approx(100.0)
    assert curve.at(100.0) == pytest.approx(0.1)


def test_few_points_or_a_rising_loss_give_no_curve() -> None:
    assert fit_loss([(0.0, 1.0), (1.0, 0.5)]) is None
    assert fit_loss([(0.0, 0.5), (1.0, 0.7), (2.0, 0.9)]) is None


def test_a_history_stays_small_and_ignores_standstill() -> None:
    history = LossHistory()
    for k in range(1000):
        history.add(float(k), 1.0 / (1.0 + k))
        history.add(float(k), 0.5)
    curve = history.curve()
    assert curve is not None
    assert curve.at(0.0) == pytest.approx(1.0, rel=0.01)
    assert history.drop == pytest.approx(0.999)


def test_speed_is_linear_until_more_is_seen() -> None:
    speed = SpeedCurve()
    assert speed.rate(2, 4) == 0.5
    speed.add(4, 1.0)
    assert speed.rate(8, 4) == pytest.approx(2.0)


def test_speed_saturates_as_observed() -> None:
    speed = SpeedCurve()
    for devices in (1, 2, 4, 8):
        speed.add(devices, 1.0 / (4.0 / devices + 0.5 + 0.05 * devices))
    assert speed.rate(16, 4) == pytest.approx(1.0 / (0.25 + 0.5 + 0.8), rel=1e-6)


def test_a_curve_does_not_depend_on_the_company_it_is_fitted_in() -> None:
    jobs = [
        [
            (60.0 * k, 0.1 * n + 1.0 / (1.0 + 0.01 * k * (n + 1)) + 0.01 * (k * 7 % 3))
            for k in range(2 + 3 * n)
        ]
        for n in range(8)
    ]
    assert fit_losses(jobs) == [fit_loss(points) for points in jobs]
    assert [curve is None for curve in fit_losses(jobs)] == [True] + [False] * 7


def test_a_loss_that_reached_zero_is_no_reason_to_stop() -> None:
    assert fit_loss([(0.0, 1.0), (1.0, 0.5), (2.0, 0.0)]) is None
