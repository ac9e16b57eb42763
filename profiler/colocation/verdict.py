"""The verdict on a set of jobs, by its measured normalized throughput."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple

from .statistics import Estimate

VerdictName = Literal["pack", "slice", "separate", "undecided"]
#: A gain below this is not worth a device that is shared: packed jobs hold their memory all the time.
WORTH = 1.05


class Verdict(NamedTuple):
    """What to do with a set, and how much measuring would decide it.

    Attributes
    ----------
    name
        ``pack``, ``slice``, ``separate`` or ``undecided``.
    more_rounds
        If undecided: about how many rounds more would decide it. Else 0.
    """

    name: VerdictName
    more_rounds: int = 0


def judge(members: Sequence[Estimate], shares: Sequence[float], gain: Estimate, rounds: int) -> Verdict:
    """Return the verdict on a set that was measured in ``rounds`` rounds.

    ``pack``: the whole interval of the gain lies above 1, and no member's whole interval below its share.
    ``separate``: there is a gain, but a member starves: it needs a device without the others.
    ``slice``: the whole interval of the gain lies below `WORTH`.
    ``undecided``: anything else. Intervals shrink with the square root of the rounds.

    Parameters
    ----------
    members
        Normalized throughput of each when packed.
    shares
        The same of each when sliced.
    gain
        The packed members' total by the sliced ones' total.
    """
    if gain.interval is None:
        return Verdict("undecided", 1)
    low, high = gain.interval
    if low > 1.0:
        starved = any(
            one.interval is not None and one.interval[1] < share
            for one, share in zip(members, shares, strict=True)
        )
        return Verdict("separate" if starved else "pack")
    if high < WORTH:
        return Verdict("slice")
    enough = max(gain.mean - 1.0, WORTH - gain.mean)
    return Verdict("undecided", max(1, ceil(rounds * ((high - gain.mean) / enough) ** 2) - rounds))
