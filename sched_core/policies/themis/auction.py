"""The partial-allocation auction: maximal Nash welfare, and hidden payments that make truth the best bid.

Source: Themis (NSDI 2020), section 3.3; the mechanism is that of Cole, Gkatzelis and Goel (EC 2013).
Pure functions of the bids. Only products and quotients of floats are used, no logarithms, so that the outcome
is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from .bids import Bid, Option
from .search import Bidder, Search, relaxed


class Award(msgspec.Struct, frozen=True):
    """What one bidder won: an option, or ``None``, and the fraction of it that it keeps (hidden payment)."""

    app: str
    option: Option | None
    fraction: float


class Verdict(msgspec.Struct, frozen=True):
    """Awards in the order of the bids, and whether all searches behind them ran to their end."""

    awards: tuple[Award, ...]
    exact: bool


def auction(offer: Sequence[int], bids: Sequence[Bid], *, effort: int = 5_000) -> Verdict:
    """Share out ``offer`` so that the product of values is largest, and charge the harm done to others.

    Parameters
    ----------
    offer
        Free devices of each node.
    bids
        At most one per app.
    effort
        Steps after which one search stops and returns the best found so far.

    Returns
    -------
    Verdict
        Bidder i keeps the fraction Π_{j≠i} V_j(with i) / Π_{j≠i} V_j(without i), in (0, 1].
    """
    bidders = [Bidder(bid, len(offer)) for bid in bids]
    bounds = relaxed(bidders, sum(offer))
    search = Search(offer, bidders, bounds, effort)
    exact = search.effort > 0
    won = [bidder.worth(choice) for bidder, choice in zip(bidders, search.best, strict=True)]
    contended = any(value < bidder.most for bidder, value in zip(bidders, won, strict=True))
    awards: list[Award] = []
    for index, (bid, choice) in enumerate(zip(bids, search.best, strict=True)):
        fraction = 1.0
        if contended and choice >= 0:
            others = [*bidders[:index], *bidders[index + 1 :]]
            without = Search(offer, others, relaxed(others[:index], sum(offer), bounds[index + 1 :]), effort)
            exact = exact and without.effort > 0
            harmed = [*won[:index], *won[index + 1 :]]
            fraction = prod(
                present / other.worth(absent)
                for other, present, absent in zip(others, harmed, without.best, strict=True)
            )
        option = bid.options[choice] if choice >= 0 else None
        awards.append(Award(bid.app, option, min(1.0, fraction)))
    return Verdict(tuple(awards), exact)
