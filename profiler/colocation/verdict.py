"""What to do with a set of jobs, by its measured normalized throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .statistics import Estimate

Verdict = Literal["pack", "slice", "separate"]


def judge(members: Sequence[Estimate], total: Estimate) -> Verdict | None:
    """The verdict; ``None`` as long as there is no interval to go by.

    Parameters
    ----------
    members
        Normalized throughput of each when packed.
    total
        Their sum. Ideal time-slicing reaches 1, and gives each member its share 1/k.

    Returns
    -------
    ``pack``: the whole interval of the total lies above 1, and no member's whole interval below its share.
    ``separate``: the total lies above 1, but a member starves: it needs a device without the others.
    ``slice``: packing has no gain that the measurement shows.
    """
    if total.interval is None:
        return None
    if total.interval[0] <= 1.0:
        return "slice"
    share = 1 / len(members)
    starved = any(one.interval is not None and one.interval[1] < share for one in members)
    return "separate" if starved else "pack"
