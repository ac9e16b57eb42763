"""Predict how jobs affect each other from sensitivity curves and pressures, and how good that is.

The throughput of a job beside another one is a product over the kinds of load: the value of the job's curve
at the other's pressure, to the power of a weight. With equal weights of sum 1 this is the geometric mean,
which is right if all kinds of load slow the job down in the same way, as processor time does on one core.
Weights are fitted to the measured pairs, with a preference for equal ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import scipy
from numpy.typing import NDArray

from .plan import Members
from .stress import Curve, throughput

#: Strength of the preference for equal weights, as a sum of squared logarithms.
_RIDGE = 0.1
#: Least throughput whose logarithm is used.
_LEAST = 0.01

Curves = Mapping[tuple[int, str], Curve]


class Prediction(msgspec.Struct, frozen=True):
    """Predicted normalized throughput of a pair.

    Attributes
    ----------
    normalized
        Predicted; of a pair that was measured, without having seen it.
    measured
        What was measured, or ``None``.
    """

    members: tuple[str, str]
    normalized: tuple[float, float]
    total: float
    measured: tuple[float, float] | None


class PredictionError(msgspec.Struct, frozen=True):
    """How far predictions of held-out pairs are from what was measured, in normalized throughput.

    Attributes
    ----------
    pairs
        How many were measured and predicted.
    mean_absolute, greatest
        Error over all members.
    mean_absolute_of_mean
        The same error if the mean of all other pairs' members is the prediction, for comparison.
    """

    pairs: int
    mean_absolute: float
    greatest: float
    mean_absolute_of_mean: float | None


def predictions(
    names: Sequence[str],
    kinds: Sequence[str],
    curves: Curves,
    measured: Mapping[Members, tuple[float, ...]],
    pairs: Sequence[Members],
) -> list[Prediction]:
    """Return the predictions of all ``pairs`` whose jobs have curves. Each is made without that pair."""
    found = []
    for pair in pairs:
        if not all((job, kind) in curves for job in pair for kind in kinds):
            continue
        others = {one: values for one, values in measured.items() if one != pair}
        weights = fit(kinds, curves, others)
        one, other = (_predict(kinds, curves, weights, *way) for way in (pair, pair[::-1]))
        outcome = measured.get(pair)
        found.append(
            Prediction(
                (names[pair[0]], names[pair[1]]),
                (one, other),
                one + other,
                None if outcome is None else (outcome[0], outcome[1]),
            )
        )
    return found


def fit(
    kinds: Sequence[str], curves: Curves, measured: Mapping[Members, tuple[float, ...]]
) -> NDArray[np.float64]:
    """Return the weight of each kind, none below 0. Without measured pairs all are equal."""
    prior = np.full(len(kinds), 1 / len(kinds))
    rows, outcomes = [], []
    for pair, values in measured.items():
        for (job, other), value in zip((pair, pair[::-1]), values, strict=True):
            if all((one, kind) in curves for one in pair for kind in kinds):
                rows.append(_logarithms(kinds, curves, job, other))
                outcomes.append(np.log(max(value, _LEAST)))
    scale = np.sqrt(_RIDGE)
    left = np.vstack([*rows, scale * np.eye(len(kinds))])
    weights, _ = scipy.optimize.nnls(left, np.array([*outcomes, *(scale * prior)]))
    return np.asarray(weights, dtype=np.float64)


def error(found: Sequence[Prediction]) -> PredictionError | None:
    """Return the error of ``found``; None if no pair was both measured and predicted."""
    known = [(one.normalized, one.measured) for one in found if one.measured is not None]
    if not known:
        return None
    off = [abs(a - b) for predicted, outcome in known for a, b in zip(predicted, outcome, strict=True)]
    outcomes = np.array([outcome for _, outcome in known])
    of_mean = None
    if len(known) > 1:
        means = (outcomes.sum() - outcomes.sum(axis=1)) / (outcomes.size - 2)
        of_mean = float(np.mean(np.abs(outcomes - means[:, None])))
    return PredictionError(len(known), float(np.mean(off)), max(off), of_mean)


def _predict(
    kinds: Sequence[str], curves: Curves, weights: NDArray[np.float64], job: int, other: int
) -> float:
    """Return the predicted throughput of ``job`` beside ``other``."""
    return float(np.exp(weights @ _logarithms(kinds, curves, job, other)))


def _logarithms(kinds: Sequence[str], curves: Curves, job: int, other: int) -> NDArray[np.float64]:
    found = [throughput(curves[job, kind], curves[other, kind].pressure) for kind in kinds]
    return np.log(np.maximum(found, _LEAST))
