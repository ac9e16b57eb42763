"""Live storages in columns: what a suspend asks of thousands is asked by C functions over whole lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from gpuslice.kernels.host import overlap

Pick = Callable[[Sequence[Any]], list[Any]]


@dataclass(slots=True)
class Storages:
    """Live storages, each once, in columns of the same order.

    Attributes
    ----------
    keys
        Their identities: ``storage._cdata``.
    labels
        For people: dtype and shape of the first tensor found over each, when it was first found there.
    fixed
        The keys of those whose address may be known to somebody who would not notice a change: C++ code
        holds a tensor over it (a pending autograd graph, DDP, a DLPack capsule), or other memory overlaps it.
    """

    storages: list[torch.UntypedStorage] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.keys)

    def those(self, selected: Sequence[Any]) -> Storages:
        """Those whose entry in ``selected`` is true."""
        if all(selected):
            return self
        return self._picked(lambda column: list(compress(column, selected)))

    def once(self) -> Storages:
        """Each once, where it came first."""
        if len(set(self.keys)) == len(self):
            return self
        return self.in_turns(firsts(self.keys))

    def in_turns(self, turns: Sequence[int]) -> Storages:
        """The same in another order, given by their positions."""
        return self._picked(picker(turns))

    def fix_overlapping(self) -> None:
        """Those over the same memory (DLPack, NumPy and back) are fixed: none of them may move alone."""
        starts = np.fromiter(self.addresses, np.int64)
        ends = starts + np.fromiter(self.sizes, np.int64)
        if overlap(starts, ends):
            ranges = sorted(zip(self.addresses, ends.tolist(), self.keys, strict=True))
            self.fixed = self.fixed | _overlapping(ranges)

    def and_those(self, others: Storages) -> Storages:
        """These, and behind them the others."""
        return Storages(
            self.storages + others.storages,
            self.keys + others.keys,
            self.sizes + others.sizes,
            self.addresses + others.addresses,
            self.labels + others.labels,
            self.fixed | others.fixed,
        )

    def _picked(self, pick: Pick) -> Storages:
        return Storages(
            pick(self.storages),
            pick(self.keys),
            pick(self.sizes),
            pick(self.addresses),
            pick(self.labels),
            self.fixed,
        )


def picker(turns: Sequence[int]) -> Pick:
    """What takes the items at these positions out of a column."""
    if len(turns) < 2:  # `itemgetter` makes a sequence of two and more
        return lambda column: [column[turn] for turn in turns]
    pick = itemgetter(*turns)
    return lambda column: list(pick(column))


def firsts(keys: Sequence[int]) -> list[int]:
    """The positions at which each key comes first."""
    return sorted(dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True)).values())


def _overlapping(ranges: Iterable[tuple[int, int, int]]) -> set[int]:
    """The keys of those that share memory with another one; ranges are start, end and key, by start."""
    found: set[int] = set()
    reach, owner = 0, -1
    for start, end, key in ranges:
        if start < reach:
            found |= {key, owner}
        if end > reach:
            reach, owner = end, key
    return found
