"""Axes of charts: round marks whose labels fit, and times in one unit an axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

_UNITS_S = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}
#: Width of a character of a label, in pixels: that of a digit in wide fonts at 12 px.
CHARACTER_PX = 7.7
#: Space between two labels, in pixels.
GAP_PX = 8.0
#: Width of a chart in a window of 500 pixels.
NARROWEST_PX = 380.0
#: Steps of a linear axis, at most.
_STEPS = 8
#: How far beyond an axis points are drawn, as a share of it. What lies farther would need no other place.
_BEYOND = 0.05


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high`` with labelled ``marks``. The unit is in the title."""

    title: str
    low: float
    high: float
    marks: Mapping[float, str]
    logarithmic: bool = False

    def place(self, values: Column) -> Column:
        """Return the places of ``values`` as shares of the axis. Points outside of it keep close to it."""
        with np.errstate(divide="ignore"):
            if self.logarithmic:
                share = np.log(values / self.low) / np.log(self.high / self.low)
            else:
                share = (values - self.low) / (self.high - self.low)
        placed: Column = np.clip(share, -_BEYOND, 1.0 + _BEYOND)
        return placed

    def fits(self, width_px: float) -> bool:
        """Return True if no two labels of a horizontal axis of this width touch."""
        places = self.place(np.array([*self.marks], dtype=np.float64)) * width_px
        labels = [
            (at, len(text) * CHARACTER_PX / 2) for at, text in zip(places, self.marks.values(), strict=True)
        ]
        return all(
            after - before >= half + half_after + GAP_PX
            for (before, half), (after, half_after) in pairwise(sorted(labels))
        )


#: A vertical axis of shares.
SHARES = Axis("", 0.0, 1.0, {share / 100: f"{share} %" for share in (0, 25, 50, 75, 100)})


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** floor(log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def number_text(value: float) -> str:
    """Return a number with three digits that count, or all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time in the unit that reads best: ``3.4 h``."""
    unit = next((name for name, size_s in _UNITS_S.items() if size_s >= 1 and abs(seconds) >= size_s), "s")
    return f"{seconds / _UNITS_S[unit]:.3g} {unit}"


def short_time(seconds: float) -> str:
    """Return a time like `duration`, below a second in milliseconds."""
    return f"{seconds * 1e3:.3g} ms" if 0 < seconds < 1 else duration(seconds)


def common_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """Return the unit, and its size in seconds, in which most of these times are numbers above 1."""
    known = sorted(abs(second) for second in seconds if second and np.isfinite(second))
    middle_s = known[(len(known) - 1) // 2] if known else 1.0
    return next(((name, size_s) for name, size_s in _UNITS_S.items() if middle_s >= size_s), ("s", 1.0))


def number_axis(title: str, high: float, low: float = 0.0, *, size: float = 1.0) -> Axis:
    """Return a linear axis whose marks are numbers of ``size``."""
    step = round_step((high - low) / size / _STEPS)
    while True:
        marks = range(ceil(low / size / step - 1e-9), floor(high / size / step + 1e-9) + 1)
        axis = Axis(title, low, high, {i * step * size: f"{i * step:g}" for i in marks})
        if axis.fits(NARROWEST_PX):
            return axis
        step = round_step(step * 1.5)


def time_axis(title: str, end_s: float) -> Axis:
    """Return an axis from 0 to ``end_s``, marked in days, hours, minutes, seconds or parts of seconds."""
    end_s = end_s or 1.0
    unit, size_s = next((item for item in _UNITS_S.items() if end_s >= 3 * item[1]), ("µs", 1e-6))
    return number_axis(f"{title}, {unit}", end_s, size=size_s)


def log_axis(title: str, values: Column, *, times: bool) -> Axis:
    """Return a logarithmic axis that contains the positive numbers among ``values``.

    ``times`` says that they are seconds; the axis is then in the unit of their middle.
    """
    known = values[np.isfinite(values) & (values > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 10.0)
    low, high = low / 1.05, high * 1.05
    if times:
        unit, size = common_unit([(low * high) ** 0.5])
        title = f"{title}, {unit}"
    else:
        size = 1.0
    powers = range(floor(log10(low / size)), ceil(log10(high / size)) + 1)
    # Finer marks first. The last way has one mark, which fits.
    ways = [((1, 2, 5), 1), ((1, 3), 1), *(((1,), every) for every in range(1, len(powers) + 1))]
    found = (
        [factor * 10.0**power for power in powers[::every] for factor in factors] for factors, every in ways
    )
    axes = (
        Axis(title, low, high, {at * size: f"{at:g}" for at in marks if low <= at * size <= high}, True)
        for marks in found
    )
    return next(axis for axis in axes if axis.fits(NARROWEST_PX))
