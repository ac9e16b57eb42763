"""How much slower jobs run beside each other, and whether sharing a device pays: estimates from live slices.

Pure functions of samples that were taken while the same jobs ran alone and together, alternately. Rates are
compared by their logarithms, so a slow-down is a difference of means, with Welch's interval. The steps of a
sample may be miscounted by one, so a sample of few steps counts as less exact. What is known from elsewhere,
a prior, is weighed against the samples by its error. Fewer samples are needed then. If the prior and the
samples contradict each other, only the samples count.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import exp, hypot, inf, log, sqrt
from statistics import fmean, variance
from typing import Annotated, NamedTuple

import msgspec

#: The confidence of every interval: high, because a decision is made at the first interval that allows one.
CONFIDENCE = 0.99
#: The number of samples of each kind before anything is said, and the number after which the means decide.
LEAST = 3
MOST = 12
#: The same as ``LEAST`` for jobs with a prior, and the standard errors by which that may differ from samples.
LEAST_WITH_PRIOR = 2
_CONTRADICTION = 3.0
#: Time-slicing makes a total of 1. Jobs are packed above ``WORTH``; packed jobs are parted below ``WORSE``.
WORTH = 1.1
WORSE = 1.0


class Sample(NamedTuple):
    """The optimizer steps made in some seconds of one kind of slice, alone or together."""

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """The steps per second."""
        return self.steps / self.seconds


class Interval(NamedTuple):
    """An estimate, and the bounds between which it lies with ``CONFIDENCE``."""

    mean: float
    low: float
    high: float


class Prior(msgspec.Struct, frozen=True):
    """A job's rate beside another job divided by its rate alone, as known from elsewhere.

    Attributes
    ----------
    log, error
        The logarithm of the quotient, and its standard error.
    """

    log: float
    error: Annotated[float, msgspec.Meta(gt=0)]


class Verdict(Enum):
    """The ways to run a set of jobs: they share a device, or they take turns."""

    PACK = "pack"
    SLICE = "slice"


class Judgement(NamedTuple):
    """The effect of sharing a device on a set of jobs, and the verdict: share or take turns.

    Attributes
    ----------
    slowdowns
        Rate alone / rate together, of each member.
    total
        Work of all together in units of one device: the sum of rates together / alone. Slicing makes 1.
    verdict
        What to do. None: the intervals do not decide yet.
    """

    slowdowns: tuple[Interval, ...]
    total: Interval
    verdict: Verdict | None


class _Ratio(NamedTuple):
    """The logarithm of a member's normalized throughput, with its standard error and degrees of freedom."""

    log: float
    error: float
    freedom: float

    def interval(self, sign: int) -> Interval:
        reach = _quantile(self.freedom) * self.error
        middle = sign * self.log
        return Interval(exp(middle), exp(middle - reach), exp(middle + reach))


def slowdown(
    alone: Sequence[Sample], together: Sequence[Sample], prior: Prior | None = None
) -> Interval | None:
    """Return how many times as long steps take beside the others. Return None with too few samples."""
    ratio = _known(alone, together, prior)
    return None if ratio is None else ratio.interval(-1)


def judge(
    members: Sequence[tuple[Sequence[Sample], Sequence[Sample]]],
    *,
    priors: Sequence[Prior | None] | None = None,
    packed: bool = False,
    worth: float = WORTH,
) -> Judgement | None:
    """Return what sharing a device does to the ``members`` of a set, and whether they should share it.

    Parameters
    ----------
    members
        The samples of each member, alone and together.
    priors
        What is known of each member from elsewhere, if anything is.
    packed
        True if they are known to do well together. Then they stay packed while it is undecided (hysteresis).
    worth
        The total above which packing pays.

    Returns
    -------
    The judgement. None before there are ``LEAST`` samples of everything, or ``LEAST_WITH_PRIOR``.
    """
    known = priors or [None] * len(members)
    found = [_known(*samples, prior) for samples, prior in zip(members, known, strict=True)]
    ratios = [ratio for ratio in found if ratio is not None]
    if len(ratios) < len(members):
        return None
    total = _total(ratios)
    enough = all(min(len(alone), len(together)) >= MOST for alone, together in members)
    return Judgement(
        tuple(ratio.interval(-1) for ratio in ratios),
        total,
        _verdict(total, worth, packed=packed, enough=enough),
    )


def judge_exact(normalized: Sequence[float], *, worth: float = WORTH) -> Judgement:
    """Return the judgement of a set whose rates are known and not measured, as those of a model are.

    Parameters
    ----------
    normalized
        Rate together / rate alone, of each member.
    """
    total = sum(normalized)
    slowdowns = [1 / value if value else inf for value in normalized]
    return Judgement(
        tuple(Interval(one, one, one) for one in slowdowns),
        exact := Interval(total, total, total),
        _verdict(exact, worth, packed=False, enough=True),
    )


def _total(ratios: Sequence[_Ratio]) -> Interval:
    """Return the sum of the normalized throughputs. Errors may go together, so they are added as they are."""
    shares = [exp(ratio.log) for ratio in ratios]
    reach = sum(
        share * _quantile(ratio.freedom) * ratio.error for share, ratio in zip(shares, ratios, strict=True)
    )
    return Interval(sum(shares), max(0.0, sum(shares) - reach), sum(shares) + reach)


def _verdict(total: Interval, worth: float, *, packed: bool, enough: bool) -> Verdict | None:
    """Return the verdict on a set with this total. Sets are judged only here, live and in simulations."""
    if packed:
        return Verdict.SLICE if total.high < WORSE else None
    if total.low > worth:
        return Verdict.PACK
    if total.high < worth:
        return Verdict.SLICE
    if not enough:
        return None
    return Verdict.PACK if total.mean > worth else Verdict.SLICE


def _known(alone: Sequence[Sample], together: Sequence[Sample], prior: Prior | None) -> _Ratio | None:
    """Combine a member's samples with its prior. Return None if there are too few samples."""
    count = min(len(alone), len(together))
    if count < (LEAST if prior is None else LEAST_WITH_PRIOR):
        return None
    ratio = _ratio(alone, together)
    if prior is None:
        return ratio
    if abs(ratio.log - prior.log) > _CONTRADICTION * hypot(prior.error, ratio.error):
        return ratio if count >= LEAST else None
    # Few samples hardly tell their own error, so the width of Student's interval counts.
    own = ratio.error * _quantile(ratio.freedom) / _quantile(inf)
    share = prior.error**2 / (prior.error**2 + own**2)  # of the samples: by the inverse of the variance
    error = prior.error * own / hypot(prior.error, own)
    return _Ratio(share * ratio.log + (1 - share) * prior.log, error, inf)


def _ratio(alone: Sequence[Sample], together: Sequence[Sample]) -> _Ratio:
    """Return Welch's comparison of two means: the logarithms of the rates together, less those alone."""
    (before, before_error, n), (after, after_error, m) = _mean_log(alone), _mean_log(together)
    square = before_error**2 + after_error**2
    freedom = square**2 / (before_error**4 / (n - 1) + after_error**4 / (m - 1))
    return _Ratio(after - before, sqrt(square), freedom)


def _mean_log(samples: Sequence[Sample]) -> tuple[float, float, int]:
    logs = [log(sample.rate) for sample in samples]
    # A count is off by up to one step, whose variance is 1/6 where both ends are uniform.
    counting = fmean(1 / (6 * sample.steps**2) for sample in samples)
    return fmean(logs), sqrt(max(variance(logs), counting) / len(logs)), len(logs)


def _quantile(freedom: float) -> float:
    from scipy import stats  # imported late: it takes half a second, which only a policy that packs needs

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
