"""What to do with a set of jobs, by its measured normalized throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .statistics import Estimate

Verdict = Literal["pack", "slice", "separate"]


def judge(members: Sequence[Estimate], shares: Sequence[float], gain: Estimate) -> Verdict | None:
    """The verdict; ``None`` as long as there is no interval to go by.

    Parameters
    ----------
    members
        Normalized throughput of each when packed.
    shares
        The same of each when sliced.
    gain
        The packed members' total by the sliced ones' total.

    Returns
    -------
    ``pack``: the whole interval of the gain lies above 1, and no member's whole interval below its share.
    ``separate``: there is a gain, but a member starves: it needs a device without the others.
    ``slice``: packing has no gain that the measurement shows.
    """
    if gain.interval is None:
        return None
    if gain.interval[0] <= 1.0:
        return "slice"
    starved = any(
        one.interval is not None and one.interval[1] < share
        for one, share in zip(members, shares, strict=True)
    )
    return "separate" if starved else "pack"
