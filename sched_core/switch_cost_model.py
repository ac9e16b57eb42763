"""The cost model of switches: seconds of a suspend, resume or migration from bytes and tensors.

Fitted online to the stages that ranks report, newer measurements counting more: a fixed part that grows with
the number of tensors, and a part in proportion to the bytes that move. There is one fit for each device and
route. Another fit, over all of them, serves devices and routes without measurements. A state that was moved
before is predicted nearer to what it took itself, because no fit knows how its bytes lie in its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import exp, log, sqrt
from typing import NamedTuple

#: The part of the time that switching may take, by default.
SWITCH_SHARE = 0.03
#: The weight that older measurements keep at each new one.
_MEMORY = 0.8
#: Stages that take longer the more bytes there are.
_MOVING = frozenset({"copy_out_s", "publish_s", "fetch_s", "reserve_s", "copy_in_s"})
#: The stage of a resume that is no cost of it: the job was parked, and others used the time.
_PARKED = "parked_s"
#: Shrinks the share of tensors, which cannot be told from the share of bytes while all jobs are alike.
_RIDGE = 0.05
#: The weight of the fit, in switches, against what a state took itself; the number of states that are kept.
_PRIOR, _STATES = 0.5, 1000
#: The number of predictions that must be compared with measurements before an error is known.
_LEAST_ERRORS = 2


class Half(Enum):
    """The halves of a switch whose cost is predicted."""

    SUSPEND = "suspend"
    RESUME = "resume"
    MIGRATION = "migration"  # the resume on another device than the one that was left


class State(NamedTuple):
    """The state that is moved: its size, and the device and route of the move."""

    nbytes: int
    tensors: int = 0
    device: str = ""
    route: str = ""


class Estimate(NamedTuple):
    """A predicted cost.

    Attributes
    ----------
    seconds
        At least 0.
    error_s
        One standard error, by how far earlier predictions were off. None: too few were compared.
    """

    seconds: float
    error_s: float | None

    def __add__(self, other: object) -> Estimate:
        """Return the cost of both. Their errors are taken as independent."""
        if not isinstance(other, Estimate):
            return NotImplemented
        known = self.error_s is not None and other.error_s is not None
        error_s = sqrt((self.error_s or 0.0) ** 2 + (other.error_s or 0.0) ** 2) if known else None
        return Estimate(self.seconds + other.seconds, error_s)


class _Fit:
    """A weighted least-squares fit of ``y = a x + b z``, a, b ≥ 0, with forgetting; ``b`` is shrunk."""

    __slots__ = ("_xx", "_xy", "_xz", "_zy", "_zz")

    def __init__(self) -> None:
        self._xx = self._xz = self._zz = self._xy = self._zy = 0.0

    def learn(self, x: float, z: float, y: float, weight: float = 1.0) -> None:
        self._xx = self._xx * _MEMORY + weight * x * x
        self._xz = self._xz * _MEMORY + weight * x * z
        self._zz = self._zz * _MEMORY + weight * z * z
        self._xy = self._xy * _MEMORY + weight * x * y
        self._zy = self._zy * _MEMORY + weight * z * y

    def predict(self, x: float, z: float) -> float:
        if not self._xx:
            return 0.0
        zz = self._zz * (1 + _RIDGE)
        determinant = self._xx * zz - self._xz * self._xz
        slope = (self._xx * self._zy - self._xz * self._xy) / determinant if determinant > 0 else 0.0
        slope = max(0.0, slope)
        level = (self._xy - self._xz * slope) / self._xx
        if level < 0:  # all of it grows with z
            level, slope = 0.0, self._zy / zz if zz else 0.0
        return level * x + slope * z


class Line:
    """The fit for one half on one device by one route."""

    __slots__ = ("_errors", "_fixed", "_moving", "_own", "_squares", "_weight", "learnt")

    def __init__(self) -> None:
        self._fixed, self._moving = _Fit(), _Fit()
        #: Sums of log(cost / fitted cost), and how many, by bytes and tensors; newer ones count more.
        self._own: dict[tuple[int, int], tuple[float, float]] = {}
        #: The sum of squares of relative errors, and how many; newer ones count more.
        self._squares = self._weight = 0.0
        self._errors = 0
        self.learnt = False

    def learn(self, nbytes: int, stages_s: Mapping[str, float], tensors: int = 0) -> None:
        """Take in a measurement, and how far it was from its prediction."""
        costs = costs_s(stages_s)
        total_s = sum(costs.values())
        predicted_s = self.predict_s(nbytes, tensors)
        if self.learnt and predicted_s > 0:
            error = total_s / predicted_s - 1
            self._squares = self._squares * _MEMORY + error * error
            self._weight = self._weight * _MEMORY + 1.0
            self._errors += 1
        moving_s = sum(seconds for name, seconds in costs.items() if name in _MOVING) if nbytes else 0.0
        if nbytes:  # the noise grows with the bytes
            self._moving.learn(nbytes, tensors, moving_s, 1.0 / nbytes)
        self._fixed.learn(1.0, tensors, total_s - moving_s)
        self.learnt = True
        self._learn_own((nbytes, tensors), total_s)

    def _learn_own(self, state: tuple[int, int], total_s: float) -> None:
        fitted_s = self._fitted_s(*state)
        if total_s <= 0 or fitted_s <= 0:
            return
        logs, count = self._own.pop(state, (0.0, 0.0))
        self._own[state] = logs * _MEMORY + log(total_s / fitted_s), count * _MEMORY + 1.0
        if len(self._own) > _STATES:
            del self._own[next(iter(self._own))]

    def predict_s(self, nbytes: int, tensors: int = 0) -> float:
        """Return the predicted cost of ``nbytes`` in so many tensors, in seconds."""
        logs, count = self._own.get((nbytes, tensors), (0.0, 0.0))
        return self._fitted_s(nbytes, tensors) * exp(logs / (count + _PRIOR))

    def _fitted_s(self, nbytes: int, tensors: int) -> float:
        return self._fixed.predict(1.0, tensors) + (self._moving.predict(nbytes, tensors) if nbytes else 0.0)

    def estimate(self, nbytes: int, tensors: int = 0) -> Estimate:
        """Return the predicted cost of ``nbytes`` in so many tensors, with its error."""
        seconds = self.predict_s(nbytes, tensors)
        if self._errors < _LEAST_ERRORS:
            return Estimate(seconds, None)
        return Estimate(seconds, seconds * sqrt(self._squares / self._weight))


class CostModel:
    """All the fits of one scheduler, or of one journal."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Half, str, str], Line] = {}
        self._overall = {half: Line() for half in Half}

    def learn(self, half: Half, state: State, stages_s: Mapping[str, float]) -> None:
        """Take in the measured stages of one half of a switch of ``state``."""
        line = self._lines.setdefault((half, state.device, state.route), Line())
        for one in (line, self._overall[half]):
            one.learn(state.nbytes, stages_s, state.tensors)

    def predict(self, half: Half, state: State) -> Estimate | None:
        """Return the cost of ``half`` for ``state``. Return None if there is nothing to go by.

        On a device or route without measurements, the cost is what it is elsewhere. A migration that was
        never measured costs as much as a resume.
        """
        line = self._lines.get((half, state.device, state.route), self._overall[half])
        if line.learnt:
            return line.estimate(state.nbytes, state.tensors)
        return self.predict(Half.RESUME, state) if half is Half.MIGRATION else None

    def switch(self, state: State) -> Estimate | None:
        """Return the cost of a suspend and a resume on the same device. An unknown half counts nothing."""
        return self._both(state, Half.RESUME, state.device)

    def migration(self, state: State, target: str) -> Estimate | None:
        """Return the cost of a suspend and a resume on ``target``. An unknown half counts nothing."""
        return self._both(state, Half.MIGRATION, target)

    def _both(self, state: State, half: Half, target: str) -> Estimate | None:
        out = self.predict(Half.SUSPEND, state)
        back = self.predict(half, state._replace(device=target))
        if out is None or back is None:
            return out or back
        return out + back


def costs_s(stages_s: Mapping[str, float]) -> dict[str, float]:
    """Return the stages of half a switch that cost the job time, in seconds."""
    return {name: seconds for name, seconds in stages_s.items() if name != _PARKED}
