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
        first = dict(zip(reversed(self.keys), range(len(self) - 1, -1, -1), strict=True))
        return self.in_turns(sorted(first.values()))

    def in_turns(self, turns: Sequence[int]) -> Storages:
        """The same in another order, given by their positions."""
        if len(turns) < 2:  # of one item `itemgetter` makes no sequence
            return self._picked(lambda column: [column[turn] for turn in turns])
        pick = itemgetter(*turns)
        return self._picked(lambda column: list(pick(column)))

    def fix_overlapping(self) -> None:
        """Those over the same memory (DLPack, NumPy and back) are fixed: none of them may move alone."""
        starts = np.fromiter(self.addresses, np.int64)
        ends = starts + np.fromiter(self.sizes, np.int64)
        if overlap(starts, ends):
            ranges = sorted(zip(self.addresses, ends.tolist(), self.keys, strict=True))
            self.fixed = self.fixed | _overlapping(ranges)

    def _picked(self, pick: Callable[[Sequence[Any]], list[Any]]) -> Storages:
        return Storages(
            pick(self.storages),
            pick(self.keys),
            pick(self.sizes),
            pick(self.addresses),
            pick(self.labels),
            self.fixed,
        )


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
