"""Curves fitted to what jobs show: training loss over progress, time over devices.

Source: Optimus (EuroSys 2018), sections 3.1 and 3.2. In plain floats, because the sums of linear
algebra libraries differ from machine to machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import fsum

import msgspec

#: Loss points kept per job; beyond, every other one is dropped.
_MOST_POINTS = 24
_FEWEST_POINTS = 3
_GRID = 12
_ROUNDS = 5


class LossCurve(msgspec.Struct, frozen=True):
    """loss(k) = 1 / (slope·k + start) + floor after k seconds of progress."""

    slope: float
    start: float
    floor: float

    def at(self, progress_s: float) -> float:
        """The loss after ``progress_s``."""
        return 1.0 / (self.slope * progress_s + self.start) + self.floor

    def ends_at_s(self, left: float) -> float:
        """Progress at which the loss has come down to ``left`` of its first height above the floor."""
        return self.start * (1.0 / left - 1.0) / self.slope


class LossHistory:
    """The losses of one job, and the curve through them."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._curve: LossCurve | None = None
        self._stale = False

    def add(self, progress_s: float, loss: float) -> None:
        """Note a loss, if there was progress since the last one."""
        if self._points and progress_s <= self._points[-1][0]:
            return
        self._points.append((progress_s, loss))
        if len(self._points) > _MOST_POINTS:
            del self._points[1:-1:2]
        self._stale = True

    @property
    def drop(self) -> float:
        """The largest decrease so far; for scaling losses of different jobs."""
        losses = [loss for _, loss in self._points]
        return max(losses) - min(losses) if losses else 0.0

    def curve(self) -> LossCurve | None:
        """The best curve, or ``None`` with too few points or a loss that does not fall."""
        if self._stale:
            self._curve = fit_loss(self._points)
            self._stale = False
        return self._curve


def fit_loss(points: Sequence[tuple[float, float]]) -> LossCurve | None:
    """Weighted least squares on 1 / (loss − floor), linear in progress, over a refined grid of floors.

    Parameters
    ----------
    points
        (progress in seconds, loss) pairs.
    """
    if len(points) < _FEWEST_POINTS:
        return None
    top = min(loss for _, loss in points) * (1.0 - 1e-6)
    low, high = 0.0, top
    best: tuple[float, LossCurve] | None = None
    for _ in range(_ROUNDS):
        step = (high - low) / _GRID
        for i in range(_GRID + 1):
            fitted = _with_floor(points, min(low + step * i, top))
            if fitted is not None and (best is None or fitted[0] < best[0]):
                best = fitted
        if best is None:
            return None
        low, high = max(0.0, best[1].floor - step), min(top, best[1].floor + step)
    return best[1] if best is not None else None


def _with_floor(points: Sequence[tuple[float, float]], floor: float) -> tuple[float, LossCurve] | None:
    """The squared error and the best curve with this floor, if it falls from a finite height."""
    # Weights turn errors of 1 / height back into errors of the loss, to first order.
    rows = [(x, 1.0 / (loss - floor), (loss - floor) ** 4) for x, loss in points]
    total = fsum(w for _, _, w in rows)
    mean_x = fsum(w * x for x, _, w in rows) / total
    mean_y = fsum(w * y for _, y, w in rows) / total
    spread = fsum(w * (x - mean_x) ** 2 for x, _, w in rows)
    slope = fsum(w * (x - mean_x) * (y - mean_y) for x, y, w in rows) / spread if spread > 0 else 0.0
    start = mean_y - slope * mean_x
    if slope <= 0 or start <= 0:
        return None
    curve = LossCurve(slope, start, floor)
    return fsum((curve.at(x) - loss) ** 2 for x, loss in points), curve


class SpeedCurve:
    """Time per unit of progress on w devices: θ₀/w + θ₁ + θ₂·w with θ ≥ 0, from what was observed.

    With observations at one number of devices only, speed is taken to be proportional to devices.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._theta: tuple[float, ...] = (1.0, 0.0, 0.0)

    def add(self, devices: int, rate: float) -> None:
        """Note that ``devices`` made ``rate`` seconds of progress per second."""
        if rate > 0 and self._seen.get(devices) != 1.0 / rate:
            self._seen[devices] = 1.0 / rate
            self._theta = self._fit()

    def rate(self, devices: int, demand: int) -> float:
        """Expected progress per second; 1 on ``demand`` devices before anything was seen."""
        if not self._seen:
            return devices / demand
        return 1.0 / _time(self._theta, devices)

    def _fit(self) -> tuple[float, ...]:
        """Least squares with every choice of terms; the best one without negative weights."""
        work = fsum(t * w for w, t in self._seen.items()) / len(self._seen)
        best, best_error = (work, 0.0, 0.0), float("inf")
        for size in range(1, min(3, len(self._seen)) + 1):
            for chosen in combinations(range(3), size):
                theta = self._least_squares(chosen)
                if theta is None or min(theta) < 0:
                    continue
                error = fsum((_time(theta, w) - t) ** 2 for w, t in self._seen.items())
                if error < best_error - 1e-15:
                    best, best_error = theta, error
        return best

    def _least_squares(self, chosen: Sequence[int]) -> tuple[float, float, float] | None:
        rows = [([(1.0 / w, 1.0, float(w))[i] for i in chosen], t) for w, t in self._seen.items()]
        terms = range(len(chosen))
        matrix = [
            [*(fsum(x[i] * x[j] for x, _ in rows) for j in terms), fsum(x[i] * t for x, t in rows)]
            for i in terms
        ]
        found = _solved(matrix)
        if found is None:
            return None
        theta = [0.0, 0.0, 0.0]
        for index, value in zip(chosen, found, strict=True):
            theta[index] = value
        return theta[0], theta[1], theta[2]


def _time(theta: tuple[float, ...], devices: int) -> float:
    return theta[0] / devices + theta[1] + theta[2] * devices


def _solved(matrix: list[list[float]]) -> list[float] | None:
    """Gauss-Jordan elimination of a small linear system, or ``None`` if it is singular."""
    size = len(matrix)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [x - factor * y for x, y in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
