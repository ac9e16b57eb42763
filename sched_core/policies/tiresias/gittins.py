"""The Gittins index of a job from a sample of total services (Tiresias, section 3.2.2).

G(a) is the best ratio, over all further services D, of the chance that a job which attained ``a`` completes
within ``D`` to the service it is expected to use up meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from importlib.resources import files
from itertools import accumulate
from math import nan


class GittinsIndex:
    """The Gittins index over a sample of attained services.

    Parameters
    ----------
    services
        Total services of past jobs, device-seconds, any order.
    """

    def __init__(self, services: Sequence[float]) -> None:
        self.services = sorted(services)
        self.sums = [0.0, *accumulate(self.services)]
        #: The last end of a look ahead, and how many services do not exceed it.
        self._until = (nan, 0)

    def within(self, attained: float, more: float) -> float:
        """Return P(S - a <= D | S > a) / E[min(S - a, D) | S > a] for ``D`` = ``more``.

        Return 0 if no S exceeds a.
        """
        services, sums = self.services, self.sums
        first = bisect_right(services, attained)
        until = attained + more
        if until != self._until[0]:
            # Jobs of one queue look ahead to the same end.
            self._until = (until, bisect_right(services, until))
        beyond = self._until[1]
        if more <= 0 or first == beyond:
            return 0.0
        completing = beyond - first
        used = sums[beyond] - sums[first] - completing * attained
        return completing / (used + more * (len(services) - beyond))

    def best(self, attained: float) -> float:
        """Return the Gittins index: the largest ``within`` over all ``D``. One pass over the sample."""
        first = bisect_right(self.services, attained)
        longer = self.services[first:]
        return max((self.within(attained, service - attained) for service in longer), default=0.0)


class PublishedIndex:
    """The lookup table of the simulator published with Tiresias, with its mistake.

    D is fixed; the expectation adds up S where the definition has S - a, so it is right at a = 0 only; the
    largest sample is left out of the counts; results are rounded on the way, as Python 2 rounds: exact halves
    go away from zero, not to the even digit.
    """

    def __init__(self, services: Sequence[int], more: int = 3250) -> None:
        self.services = sorted(services)
        self.sums = [0, *accumulate(self.services)]
        self.table = [self._entry(service - 1, more) for service in self.services]

    def at(self, attained: float) -> float:
        """Return the index of a job that attained ``attained``."""
        position = bisect_right(self.services, int(attained))
        return self.table[position] if position < len(self.table) else 0.0

    def _entry(self, attained: int, more: int) -> float:
        services, total = self.services, len(self.services)
        first = bisect_right(services, attained)
        beyond = total - 1
        if attained + more <= services[-1] - 1:
            beyond = bisect_right(services, attained + more)
        chance = _half_up((beyond - first) / (total - first), 5)
        used = self.sums[beyond] - self.sums[first] + more * (total - beyond)
        return _half_up(chance * 1_000_000 / (used // (total - first)), 4)


def _half_up(value: float, digits: int) -> float:
    """Round to so many decimals; halves go up."""
    return float(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def yarn_services() -> list[int]:
    """Return the sample of services that is used where no distribution is known; see data/README.md."""
    text = (
        files("gpuslice.sched_core.policies").joinpath("data/yarn-gput1000.csv").read_text(encoding="utf-8")
    )
    return [int(line) for line in text.split()[1:]]
