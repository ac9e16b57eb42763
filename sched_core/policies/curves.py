"""The curve of a job's training loss over its progress.

Source: Optimus (EuroSys 2018), section 3.1. Sums are spelled out, because those of linear algebra
libraries differ from machine to machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Loss points kept per job; beyond, every other one is dropped.
_MOST_POINTS = 24
_FEWEST_POINTS = 3
_GRID = 12
_ROUNDS = 5
#: Jobs fitted at once: few enough to stay in the cache.
_TOGETHER = 32


class LossCurve(msgspec.Struct, frozen=True):
    """loss(k) = 1 / (slope·k + start) + floor after k seconds of progress."""

    slope: float
    start: float
    floor: float

    def at(self, progress_s: float) -> float:
        """Return the loss after ``progress_s``."""
        return 1.0 / (self.slope * progress_s + self.start) + self.floor

    def ends_at_s(self, left: float) -> float:
        """Return the progress at which the loss is down to ``left`` of its first height above the floor."""
        return self.start * (1.0 / left - 1.0) / self.slope


class LossHistory:
    """The losses of one job, and the curve through them."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._curve: LossCurve | None = None
        self._stale = False

    def add(self, progress_s: float, loss: float) -> None:
        """Add a loss, unless there was no progress since the last one."""
        if self._points and progress_s <= self._points[-1][0]:
            return
        self._points.append((progress_s, loss))
        if len(self._points) > _MOST_POINTS:
            del self._points[1:-1:2]
        self._stale = True

    @property
    def drop(self) -> float:
        """Return the largest decrease of the loss so far, by which losses of different jobs are scaled."""
        losses = [loss for _, loss in self._points]
        return max(losses) - min(losses) if losses else 0.0

    @property
    def points(self) -> Sequence[tuple[float, float]]:
        """Return the (progress, loss) pairs that are kept."""
        return self._points

    @property
    def stale(self) -> bool:
        """Return True if points were added since the curve was fitted."""
        return self._stale

    def curve_is(self, curve: LossCurve | None) -> None:
        """Set the fitted curve of the present points."""
        self._curve, self._stale = curve, False

    def curve(self) -> LossCurve | None:
        """Return the fitted curve. Return None with too few points or a loss that does not fall."""
        if self._stale:
            self.curve_is(fit_loss(self._points))
        return self._curve


def refit(histories: Iterable[LossHistory]) -> None:
    """Fit all curves that have new points.

    Fitting them together takes a fraction of the time.
    """
    stale = [history for history in histories if history.stale]
    for first in range(0, len(stale), _TOGETHER):
        some = stale[first : first + _TOGETHER]
        for history, curve in zip(some, fit_losses([history.points for history in some]), strict=True):
            history.curve_is(curve)


def fit_loss(points: Sequence[tuple[float, float]]) -> LossCurve | None:
    """Return the curve through one job's (progress in seconds, loss) pairs; see `fit_losses`."""
    return fit_losses([points])[0]


def fit_losses(jobs: Sequence[Sequence[tuple[float, float]]]) -> list[LossCurve | None]:
    """Fit a curve to the pairs of each job.

    Weighted least squares on 1 / (loss − floor), linear in progress, over a refined grid of floors.

    Every number comes from single additions, multiplications and divisions in a fixed order, so it does not
    depend on the machine nor on which jobs are fitted together.

    Parameters
    ----------
    jobs
        (progress in seconds, loss) pairs, job by job.
    """
    curves: list[LossCurve | None] = [None] * len(jobs)
    fitted = [index for index, points in enumerate(jobs) if len(points) >= _FEWEST_POINTS]
    if not fitted:
        return curves
    with np.errstate(all="ignore"):
        search = _FloorSearch([jobs[index] for index in fitted])
        for _ in range(_ROUNDS):
            search.refine()
    for index, curve in zip(fitted, search.curves(), strict=True):
        curves[index] = curve
    return curves


class _FloorSearch:
    """A search for the best floor of each job's loss curve: over grids that get finer.

    Arrays are (points, jobs, floors); jobs with fewer points have ``counted`` 0 where others have one.
    """

    def __init__(self, jobs: Sequence[Sequence[tuple[float, float]]]) -> None:
        shape = (max(map(len, jobs)), len(jobs), 1)
        self._x, self._loss, self._counted = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for index, points in enumerate(jobs):
            count = len(points)
            self._x[:count, index, 0] = [x for x, _ in points]
            self._loss[:count, index, 0] = [loss for _, loss in points]
            self._loss[count:, index] = points[0][1]
            self._counted[:count, index] = 1.0
        self._low = np.zeros(len(jobs))
        self._top = self._loss.min(axis=(0, 2)) * (1.0 - 1e-6)
        self._high = self._top
        self._error = np.full(len(jobs), np.inf)
        #: Slope, start and floor with the smallest error so far; not a number if no floor gives a curve.
        self._best = np.full((3, len(jobs)), np.nan)

    def refine(self) -> None:
        """Try a grid of floors, and narrow the range to the neighbours of the best."""
        step = (self._high - self._low) / _GRID
        floors = np.minimum(self._low[:, None] + step[:, None] * np.arange(_GRID + 1.0), self._top[:, None])
        slope, start, error = self._lines(floors)
        rows, columns = np.arange(len(step)), error.argmin(axis=1)
        better = error[rows, columns] < self._error
        self._error = np.where(better, error[rows, columns], self._error)
        found = np.stack([values[rows, columns] for values in (slope, start, floors)])
        self._best = np.where(better, found, self._best)
        floor = self._best[2]
        self._low, self._high = np.maximum(0.0, floor - step), np.minimum(self._top, floor + step)

    def curves(self) -> list[LossCurve | None]:
        """Return the fitted curve of each job, in the order given."""
        return [
            LossCurve(slope, start, floor) if math.isfinite(error) else None
            for error, slope, start, floor in zip(self._error.tolist(), *self._best.tolist(), strict=True)
        ]

    def _lines(self, floors: Floats) -> tuple[Floats, Floats, Floats]:
        """Return slope, start and squared error of the line for each floor.

        The error is infinite if the curve rises.
        """
        height = self._loss - floors
        y = 1.0 / height
        # Weights turn errors of 1 / height back into errors of the loss, to first order.
        weight = height * height
        weight *= weight
        weight *= self._counted
        total = _sum(weight)
        mean_x, mean_y = _sum(weight * self._x) / total, _sum(weight * y) / total
        x = self._x - mean_x
        weight *= x
        spread = _sum(weight * x)
        slope = _sum(weight * (y - mean_y)) / spread
        start = mean_y - slope * mean_x
        miss = 1.0 / (slope * self._x + start) + floors - self._loss
        error = _sum(miss * miss * self._counted)
        falls = (spread > 0) & (slope > 0) & (start > 0)
        return slope, start, np.where(falls & np.isfinite(error), error, np.inf)


def _sum(terms: Floats) -> Floats:
    """Return each job's sum over its points, added up in order."""
    total: Floats = np.add.reduce(terms, axis=0)
    return total
