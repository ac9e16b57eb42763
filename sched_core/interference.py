"""How much slower jobs run beside each other, and whether sharing a device pays: estimates from live slices.

Pure functions of samples that were taken while the same jobs ran alone and together, alternately. Rates are
compared by their logarithms, so a slow-down is a difference of means, with Welch's interval. A sample of few
steps is not sharper than the step it may be off by. What is known from elsewhere, a prior, is weighed by its
error against the samples, which need to be fewer then; if the two contradict each other, the samples count.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import exp, hypot, inf, log, sqrt
from statistics import fmean, variance
from typing import Annotated, NamedTuple

import msgspec

#: Of every interval: high, because a decision is made at the first interval that allows one.
CONFIDENCE = 0.99
#: Samples of each kind before anything is said, and after which the means decide.
LEAST = 3
MOST = 12
#: The first, of jobs with a prior; and by how many standard errors that may differ from the samples.
LEAST_WITH_PRIOR = 2
_CONTRADICTION = 3.0
#: Time-slicing makes 1. Packing has to be worth its trouble, and is given up only if it is worse than that.
WORTH = 1.1
WORSE = 1.0


class Sample(NamedTuple):
    """Optimizer steps made in some seconds of one kind of slice."""

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


class Interval(NamedTuple):
    """An estimate and between what it lies, with ``CONFIDENCE``."""

    mean: float
    low: float
    high: float


class Prior(msgspec.Struct, frozen=True):
    """What is known from elsewhere of a job beside another: its rate there by its rate alone.

    Attributes
    ----------
    log, error
        The logarithm of that, and its standard error.
    """

    log: float
    error: Annotated[float, msgspec.Meta(gt=0)]


class Verdict(Enum):
    """What to do with a set of jobs."""

    PACK = "pack"
    SLICE = "slice"


class Judgement(NamedTuple):
    """What sharing does to a set.

    Attributes
    ----------
    slowdowns
        Of each member: rate alone / rate together.
    total
        Work of all together in units of one device: the sum of rates together / alone. Slicing makes 1.
    verdict
        ``None``: the intervals do not decide yet.
    """

    slowdowns: tuple[Interval, ...]
    total: Interval
    verdict: Verdict | None


class _Ratio(NamedTuple):
    """Of a member: the logarithm of its normalized throughput, with its standard error."""

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
    """How many times as long steps take beside the others; ``None`` with too few samples."""
    ratio = _known(alone, together, prior)
    return None if ratio is None else ratio.interval(-1)


def judge(
    members: Sequence[tuple[Sequence[Sample], Sequence[Sample]]],
    *,
    priors: Sequence[Prior | None] | None = None,
    packed: bool = False,
    worth: float = WORTH,
) -> Judgement | None:
    """Whether the members of a set should share a device.

    Parameters
    ----------
    members
        Samples of each alone and together.
    priors
        What is known from elsewhere of each, if anything is.
    packed
        Whether they are known to do well together: then what is still undecided leaves it so (hysteresis).
    worth
        What the total has to be above.

    Returns
    -------
    ``None`` before there are ``LEAST`` samples of everything, or ``LEAST_WITH_PRIOR``.
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
    """The same where rates are not measured but known, as those of a model are.

    Parameters
    ----------
    normalized
        Of each member: rate together / rate alone.
    """
    total = sum(normalized)
    slowdowns = [1 / value if value else inf for value in normalized]
    return Judgement(
        tuple(Interval(one, one, one) for one in slowdowns),
        exact := Interval(total, total, total),
        _verdict(exact, worth, packed=False, enough=True),
    )


def _total(ratios: Sequence[_Ratio]) -> Interval:
    """The members' normalized throughputs together; errors may go together, so they are added as they are."""
    shares = [exp(ratio.log) for ratio in ratios]
    reach = sum(
        share * _quantile(ratio.freedom) * ratio.error for share, ratio in zip(shares, ratios, strict=True)
    )
    return Interval(sum(shares), max(0.0, sum(shares) - reach), sum(shares) + reach)


def _verdict(total: Interval, worth: float, *, packed: bool, enough: bool) -> Verdict | None:
    """The one place where it is decided, live and in simulations."""
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
    """What samples and prior say together; ``None`` with too few samples."""
    count = min(len(alone), len(together))
    if count < (LEAST if prior is None else LEAST_WITH_PRIOR):
        return None
    ratio = _ratio(alone, together)
    if prior is None:
        return ratio
    if abs(ratio.log - prior.log) > _CONTRADICTION * hypot(prior.error, ratio.error):
        return ratio if count >= LEAST else None
    # Few samples hardly tell their own error: what counts is how wide Student makes their interval.
    own = ratio.error * _quantile(ratio.freedom) / _quantile(inf)
    share = prior.error**2 / (prior.error**2 + own**2)  # of the samples: by the inverse of the variance
    error = prior.error * own / hypot(prior.error, own)
    return _Ratio(share * ratio.log + (1 - share) * prior.log, error, inf)


def _ratio(alone: Sequence[Sample], together: Sequence[Sample]) -> _Ratio:
    """Welch's comparison of two means of logarithms."""
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
    from scipy import stats  # late: half a second that only whoever packs has to spend

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
