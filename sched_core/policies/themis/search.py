"""Exact maximization of a product of values: who gets which option of an offer.

Only products and quotients of floats are used, no logarithms, so that the outcome is the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bids import Bid

#: Products that differ by less than this factor count as equal; the first one found wins.
_SAME = 1.0 + 1e-12

#: Value as a share of the bid's best, devices, devices by node, index of the option (−1: nothing).
Way = tuple[float, int, tuple[tuple[int, int], ...], int]


class Bidder:
    """A bid, prepared for the search.

    Attributes
    ----------
    most
        The largest value in the bid.
    ways
        What is better than nothing, and nothing; most valuable first.
    node_classes
        By node, a number for all that the bid says of it: nodes of one class can be swapped.
    """

    def __init__(self, bid: Bid, nodes: int) -> None:
        self._bid = bid
        self.most = max([bid.nothing, *(option.value for option in bid.options)])
        self.ways: list[Way] = [
            (option.value / self.most, option.size, tuple(option.counts.items()), index)
            for index, option in enumerate(bid.options)
            if option.value > bid.nothing
        ]
        self.ways.append((bid.nothing / self.most, 0, (), -1))
        self.ways.sort(key=lambda way: (-way[0], way[1]))
        self.best_of_size: dict[int, float] = {}
        said: list[list[tuple[float, ...]]] = [[] for _ in range(nodes)]
        for value, size, counts, index in self.ways:
            self.best_of_size[size] = max(value, self.best_of_size.get(size, 0.0))
            for node, count in counts:
                said[node].append((value, size, count, -1 if len(counts) == 1 else index))
        known: dict[tuple[object, ...], int] = {}
        self.node_classes = [known.setdefault(tuple(sorted(ways)), len(known)) for ways in said]

    def worth(self, choice: int) -> float:
        """Return the value of option ``choice``."""
        return self._bid.nothing if choice < 0 else self._bid.options[choice].value


def relaxed(bidders: Sequence[Bidder], capacity: int, after: Sequence[list[float]] = ()) -> list[list[float]]:
    """Return ``bounds[k][c]``: the largest product of bidders k, k+1, … with ``c`` devices of any node.

    ``after`` has the bounds of bidders that follow, if there are any.
    """
    rows = list(reversed(after)) or [[1.0] * (capacity + 1)]
    for bidder in reversed(bidders):
        below = rows[-1]
        nothing = bidder.best_of_size[0]
        row = [nothing * product for product in below]
        for size, value in bidder.best_of_size.items():
            if 0 < size <= capacity:
                row[size:] = map(
                    max, row[size:], [value * product for product in below[: capacity + 1 - size]]
                )
        rows.append(row)
    rows.reverse()
    return rows


class Search:
    """A branch-and-bound search for the options, one per bidder, with the largest product of values.

    Parameters
    ----------
    bounds
        The bounds of the same bidders, as ``relaxed`` returns them.
    effort
        Steps after which the search gives up.

    Attributes
    ----------
    best
        The option of each bidder.
    effort
        What is left; 0 if the search was cut short.
    """

    def __init__(
        self, offer: Sequence[int], bidders: Sequence[Bidder], bounds: Sequence[list[float]], effort: int
    ) -> None:
        self.effort = effort
        self._ways = [bidder.ways for bidder in bidders]
        self._bounds = bounds
        self._room = list(offer)
        self._chosen = [-1] * len(bidders)
        self.best = list(self._chosen)
        self._best_product = 0.0
        self._marks = _marks(offer, bidders)
        #: By depth: the best product with which each state was reached.
        self._reached: list[dict[int, float]] = [{} for _ in bidders]
        if bidders:
            self._descend(
                0, sum(offer), 1.0, sum(m[room] for m, room in zip(self._marks, offer, strict=True))
            )

    def _descend(self, depth: int, left: int, product: float, state: int) -> None:
        """Try every option of bidder ``depth`` that may still beat the best known product.

        ``state`` adds up a mark for the room on each node; nodes that can be swapped have the same marks.
        """
        room, marks, after = self._room, self._marks, self._bounds[depth + 1]
        last = depth + 1 == len(self._ways)
        reached = {} if last else self._reached[depth + 1]
        for value, size, counts, index in self._ways[depth]:
            if size > left or self.effort <= 0:
                continue
            next_product = product * value
            if next_product * after[left - size] <= self._best_product * _SAME:
                continue
            next_state = state
            for node, count in counts:
                if room[node] < count:
                    break
                next_state += marks[node][room[node] - count] - marks[node][room[node]]
            else:
                self.effort -= 1
                self._chosen[depth] = index
                if last:
                    self._best_product = next_product
                    self.best = list(self._chosen)
                elif next_product > reached.get(next_state, 0.0):
                    reached[next_state] = next_product
                    for node, count in counts:
                        room[node] -= count
                    self._descend(depth + 1, left - size, next_product, next_state)
                    for node, count in counts:
                        room[node] += count


def _marks(offer: Sequence[int], bidders: Sequence[Bidder]) -> list[list[int]]:
    """Return a number for each node and each count of free devices that it may have.

    The sum over nodes tells how many nodes of each kind have which room.

    Nodes of one kind mean the same to every bidder: states that differ by swapping them are one.
    """
    bits, shift = len(offer).bit_length(), 0
    marks: dict[tuple[int, ...], list[int]] = {}
    most = max(offer)
    found: list[list[int]] = []
    for node in range(len(offer)):
        kind = tuple(bidder.node_classes[node] for bidder in bidders)
        if kind not in marks:
            marks[kind] = [1 << (shift + bits * room) for room in range(most + 1)]
            shift += bits * (most + 1)
        found.append(marks[kind])
    return found
