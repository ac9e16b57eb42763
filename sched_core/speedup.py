"""How fast a job is on other numbers of devices: a curve through what was measured.

Source: Optimus (EuroSys 2018), section 3.2. Sums are spelled out, because those of linear algebra libraries
differ from machine to machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

#: The speed that a further device must add, as a part of what the others add on average. Less may be an error
#: of measurement.
_LEAST_GAIN = 0.05
#: The terms that a curve may have. Of choices that fit alike, the first counts: where more devices were no
#: faster, fewer are then expected to do as well, so that fewer are tried, and measured.
_CHOICES = ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))


class SpeedCurve:
    """A curve of the time per unit of progress on w devices: θ₀/w + θ₁ + θ₂·w with θ ≥ 0.

    It is fitted to what was observed. With observations at one number of devices only, speed is taken to be
    proportional to devices.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._theta: tuple[float, ...] = (1.0, 0.0, 0.0)

    def add(self, devices: int, rate: float) -> None:
        """Note that ``devices`` devices made ``rate`` seconds of progress per second, and fit the curve."""
        if rate > 0 and self._seen.get(devices) != 1.0 / rate:
            self._seen[devices] = 1.0 / rate
            self._theta = self._fit()

    def learn(self, rates: Mapping[int, float]) -> None:
        """Note several rates, by number of devices."""
        for devices, rate in rates.items():
            self.add(devices, rate)

    @property
    def seen(self) -> Mapping[int, float]:
        """The rates that were noted, by number of devices."""
        return {devices: 1.0 / time_s for devices, time_s in self._seen.items()}

    def rate(self, devices: int, demand: int) -> float:
        """Return the expected progress per second; 1 on ``demand`` devices before anything was noted."""
        if not self._seen:
            return devices / demand
        return 1.0 / _time(self._theta, devices)

    def gains(self, devices: int, demand: int) -> bool:
        """Return True if the job is faster on ``devices`` devices than on one device less.

        The curve has one maximum: if not, further devices do not make it faster, either.
        """
        before = self.rate(devices - 1, demand)
        return self.rate(devices, demand) > before * (1.0 + _LEAST_GAIN / (devices - 1))

    def _fit(self) -> tuple[float, ...]:
        """Return the least-squares fit without negative weights that is best, over all choices of terms."""
        work = fsum(t * w for w, t in self._seen.items()) / len(self._seen)
        best, best_error = (work, 0.0, 0.0), float("inf")
        for chosen in _CHOICES:
            theta = self._least_squares(chosen) if len(chosen) <= len(self._seen) else None
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
    """Return the solution of a small linear system, by Gauss-Jordan elimination. None: it is singular."""
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
