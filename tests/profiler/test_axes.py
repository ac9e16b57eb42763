"""Axes: round marks, one unit an axis, and labels that fit in the narrowest window."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from gpuslice.profiler.axes import (
    NARROWEST_PX,
    Axis,
    common_unit,
    duration,
    log_axis,
    number_axis,
    number_text,
    round_step,
    time_axis,
)

#: From nanoseconds to years, in irregular steps.
ENDS_S = [factor * 10.0**power for factor, power in product((1, 1.7, 3.1, 9.99), range(-9, 8))]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (0.25, "0.25 s"), (90, "1.5 min"), (7200, "2 h"), (864_000, "10 d")]
)
def test_durations_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("end_s", [*ENDS_S, 0])
def test_time_axes_have_a_handful_of_round_marks_that_fit(end_s: float) -> None:
    axis = time_axis("time", end_s)
    assert 3 <= len(axis.marks) <= 9
    assert max(axis.marks) <= (end_s or 1) * (1 + 1e-9)
    assert axis.fits(NARROWEST_PX)
    assert re.fullmatch(r"time, (d|h|min|s|ms|µs)", axis.title)
    assert all(re.fullmatch(r"[\d.e-]+", text) for text in axis.marks.values()), "the unit is in the title"


@pytest.mark.parametrize(
    ("low", "ratio"), [*product((1e-4, 0.3, 1.0, 77.0, 1e5), (1.0, 1.2, 3, 40, 1e4, 1e9))]
)
@pytest.mark.parametrize("times", [False, True])
def test_labels_of_logarithmic_axes_fit(low: float, ratio: float, times: bool) -> None:
    axis = log_axis("x", np.array([low, low * ratio]), times=times)
    assert axis.fits(NARROWEST_PX)
    assert axis.low < low <= low * ratio < axis.high
    assert all(axis.low <= mark <= axis.high for mark in axis.marks)
    assert axis.marks or ratio < 10


def test_labels_that_touch_do_not_fit() -> None:
    axis = Axis("x", 0.0, 1.0, {0.0: "0.25", 0.1: "0.35", 1.0: "1"})
    assert not axis.fits(300)
    assert axis.fits(500)


def test_logarithmic_axes_hold_all_that_can_be_shown() -> None:
    axis = log_axis("rho", np.array([0.0, 0.5, 50.0, np.inf, np.nan]), times=False)
    assert (axis.low < 0.5, axis.high > 50) == (True, True)
    assert list(axis.marks.values()) == ["0.5", "1", "2", "5", "10", "20", "50"]
    places = axis.place(np.array([axis.low, np.sqrt(axis.low * axis.high)]))
    assert places == pytest.approx([0, 0.5])
    assert axis.place(np.array([np.inf]))[0] > 1, "what is beyond the axis is drawn beyond it"


def test_a_logarithmic_axis_of_times_is_in_the_unit_of_their_middle() -> None:
    axis = log_axis("wait", np.array([60.0, 864_000.0]), times=True)
    assert axis.title == "wait, h"
    assert axis.marks[36_000.0] == "10"


@pytest.mark.parametrize(
    ("least", "step"), [(0.3, 0.5), (0.5, 0.5), (0.50001, 1), (6, 10), (1e-9, 1e-9), (0, 1), (120, 200)]
)
def test_round_steps(least: float, step: float) -> None:
    assert round_step(least) == pytest.approx(step)


def test_marks_of_an_axis_that_does_not_begin_at_zero() -> None:
    assert list(number_axis("x", 9.5, -0.5).marks.values()) == ["0", "2", "4", "6", "8"]


def test_the_common_unit_is_that_of_the_middle() -> None:
    assert common_unit([0.0, 3.0, 7200.0, 9000.0, np.inf]) == ("h", 3600.0)
    assert common_unit([]) == ("s", 1.0)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1.618, "1.62"), (123.4, "123"), (98_765.4, "98,765")])
def test_numbers_have_three_digits_that_count(value: float, text: str) -> None:
    assert number_text(value) == text
