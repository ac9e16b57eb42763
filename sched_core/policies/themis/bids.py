"""What apps answer to an offer."""

from __future__ import annotations

import msgspec

#: Gang of one job: its id and (node, devices) pairs.
Gang = tuple[str, tuple[tuple[int, int], ...]]


class Option(msgspec.Struct, frozen=True):
    """A subset of the offer and what it is worth: devices of a node are interchangeable, nodes are not.

    Attributes
    ----------
    gangs
        How many devices of which node each job would get.
    value
        1/ρ of the app if it gets just this.
    """

    gangs: tuple[Gang, ...]
    value: float

    @property
    def counts(self) -> dict[int, int]:
        """Return the number of devices by node."""
        total: dict[int, int] = {}
        for _, counts in self.gangs:
            for node, count in counts:
                total[node] = total.get(node, 0) + count
        return total

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return sum(count for _, counts in self.gangs for _, count in counts)


class Bid(msgspec.Struct, frozen=True):
    """One app's answer to an offer: options with their values.

    Attributes
    ----------
    app
        Name of the app that bids.
    nothing
        Value of getting nothing; positive, else payments would not be defined.
    options
        The table {subset → value}.
    """

    app: str
    nothing: float
    options: tuple[Option, ...]
