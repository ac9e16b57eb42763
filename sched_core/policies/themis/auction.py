"""The partial-allocation auction: maximal Nash welfare, and hidden payments that make truth the best bid.

Source: Themis (NSDI 2020), section 3.3; the mechanism is that of Cole, Gkatzelis and Goel (EC 2013).
Pure functions of the bids. Only products and quotients of floats are used, no logarithms, so that the outcome
is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

#: Products that differ by less than this factor count as equal; the first one found wins.
_SAME = 1.0 + 1e-12

#: Gang of one job: its id and (node, devices) pairs.
Gang = tuple[str, tuple[tuple[int, int], ...]]


class Option(msgspec.Struct, frozen=True):
    """A subset of the offer and what it is worth: devices of a node are interchangeable, nodes are not.

    Attributes
    ----------
    gangs
        Which job would get how many devices of which node.
    value
        1/ρ of the app if it gets just this.
    """

    gangs: tuple[Gang, ...]
    value: float

    @property
    def counts(self) -> dict[int, int]:
        """Devices by node."""
        total: dict[int, int] = {}
        for _, counts in self.gangs:
            for node, count in counts:
                total[node] = total.get(node, 0) + count
        return total

    @property
    def size(self) -> int:
        """Devices in all."""
        return sum(count for _, counts in self.gangs for _, count in counts)


class Bid(msgspec.Struct, frozen=True):
    """What one app answers to an offer.

    Attributes
    ----------
    app
        Whose bid.
    nothing
        Value of getting nothing; positive, else payments would not be defined.
    options
        The table {subset → value}.
    """

    app: str
    nothing: float
    options: tuple[Option, ...]


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
    """Share out ``offer`` so that the product of values is largest, and charge for the harm done to others.

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
    choices, exact = best_choices(offer, bids, effort=effort)
    won = [_value(bid, choice) for bid, choice in zip(bids, choices, strict=True)]
    contended = any(value < _best(bid) for bid, value in zip(bids, won, strict=True))
    awards: list[Award] = []
    for index, (bid, choice) in enumerate(zip(bids, choices, strict=True)):
        fraction = 1.0
        if contended and choice >= 0:
            others = [*bids[:index], *bids[index + 1 :]]
            without, closed = best_choices(offer, others, effort=effort)
            exact = exact and closed
            harmed = [*won[:index], *won[index + 1 :]]
            fraction = prod(
                present / _value(other, absent)
                for other, present, absent in zip(others, harmed, without, strict=True)
            )
        option = bid.options[choice] if choice >= 0 else None
        awards.append(Award(bid.app, option, min(1.0, fraction)))
    return Verdict(tuple(awards), exact)


def best_choices(offer: Sequence[int], bids: Sequence[Bid], *, effort: int = 5_000) -> tuple[list[int], bool]:
    """The option of each bid (−1: nothing) for the largest product of values, and whether proven."""
    search = _Search(offer, bids, effort)
    search.descend(0, sum(offer), 1.0)
    return search.best, search.effort > 0


class _Search:
    """Depth-first branch and bound. The bound forgets which node a device is on and counts devices only."""

    def __init__(self, offer: Sequence[int], bids: Sequence[Bid], effort: int) -> None:
        self.effort = effort
        self._room = list(offer)
        self._chosen = [-1] * len(bids)
        self.best = list(self._chosen)
        self._best_product = 0.0
        #: Per bid, most valuable first: (value as a share of the bid's best, devices, by node, index).
        self._ways: list[list[tuple[float, int, list[tuple[int, int]], int]]] = []
        for bid in bids:
            scale = _best(bid)
            ways = [
                (option.value / scale, option.size, list(option.counts.items()), index)
                for index, option in enumerate(bid.options)
                if option.value > bid.nothing
            ]
            ways.append((bid.nothing / scale, 0, [], -1))
            ways.sort(key=lambda way: (-way[0], way[1]))
            self._ways.append(ways)
        self._bounds = self._relaxed(sum(offer))
        self._kind = self._kinds()
        #: Best product with which each (depth, room by kind of node) was reached.
        self._reached: dict[tuple[int, tuple[tuple[int, int], ...]], float] = {}

    def _kinds(self) -> list[int]:
        """Nodes of one kind mean the same to every bid: states that differ by swapping them are one."""
        seen: list[list[tuple[float, ...]]] = [[] for _ in self._room]
        for number, ways in enumerate(self._ways):
            for value, size, counts, index in ways:
                for node, count in counts:
                    seen[node].append((number, value, size, count, -1 if len(counts) == 1 else index))
        signatures = [tuple(sorted(entries)) for entries in seen]
        known = {signature: kind for kind, signature in enumerate(signatures)}
        return [known[signature] for signature in signatures]

    def _relaxed(self, capacity: int) -> list[list[float]]:
        """``bounds[k][c]``: the largest product of bids k, k+1, … with ``c`` devices of any node."""
        rows = [[1.0] * (capacity + 1)]
        for ways in reversed(self._ways):
            by_size: dict[int, float] = {}
            for value, size, _, _ in ways:
                by_size[size] = max(value, by_size.get(size, 0.0))
            after = rows[-1]
            rows.append(
                [
                    max(value * after[left - size] for size, value in by_size.items() if size <= left)
                    for left in range(capacity + 1)
                ]
            )
        rows.reverse()
        return rows

    def descend(self, depth: int, left: int, product: float) -> None:
        """Try every way of bid ``depth`` that may still beat the best known."""
        if depth == len(self._ways):
            self._best_product = product
            self.best = list(self._chosen)
            return
        room, after = self._room, self._bounds[depth + 1]
        state = (depth, tuple(sorted(zip(self._kind, room, strict=True))))
        if product <= self._reached.get(state, 0.0):
            return
        self._reached[state] = product
        for value, size, counts, index in self._ways[depth]:
            if size > left or self.effort <= 0:
                continue
            if product * value * after[left - size] <= self._best_product * _SAME:
                continue
            if any(room[node] < count for node, count in counts):
                continue
            self.effort -= 1
            for node, count in counts:
                room[node] -= count
            self._chosen[depth] = index
            self.descend(depth + 1, left - size, product * value)
            for node, count in counts:
                room[node] += count


def _value(bid: Bid, choice: int) -> float:
    return bid.nothing if choice < 0 else bid.options[choice].value


def _best(bid: Bid) -> float:
    return max([bid.nothing, *(option.value for option in bid.options)])
