"""Live storages in columns: what a suspend asks of thousands is asked by C functions over whole lists."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import msgspec
import torch


class Found(msgspec.Struct, gc=False):
    """One live storage.

    Attributes
    ----------
    key
        Its identity: ``storage._cdata``.
    label
        For people: dtype and shape of the first tensor found over it.
    fixed
        Its address may be known to somebody who would not notice a change: C++ code holds a tensor over
        it (a pending autograd graph, DDP, a DLPack capsule), or other memory overlaps it.
    """

    storage: torch.UntypedStorage
    key: int
    nbytes: int
    address: int
    label: str
    fixed: bool = False


@dataclass(slots=True)
class Storages:
    """Live storages, each once; what is said of `Found` one by one, in columns of the same order.

    Attributes
    ----------
    fixed
        The keys of those that are.
    """

    storages: list[torch.UntypedStorage] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Found:
        key = self.keys[index]
        return Found(
            self.storages[index],
            key,
            self.sizes[index],
            self.addresses[index],
            self.labels[index],
            key in self.fixed,
        )

    def __iter__(self) -> Iterator[Found]:
        return map(self.__getitem__, range(len(self)))

    def those(self, selected: Sequence[Any]) -> Storages:
        """Those whose entry in ``selected`` is true."""
        if all(selected):
            return self
        return self._picked(lambda column: list(compress(column, selected)))

    def in_turns(self, turns: Sequence[int]) -> Storages:
        """The same in another order, given by their positions."""
        return self._picked(lambda column: list(map(column.__getitem__, turns)))

    def by_address(self) -> Storages:
        """In the order of their addresses; those over the same memory are fixed (DLPack, NumPy and back).

        None of such may move alone.
        """
        ordered = self.in_turns(sorted(range(len(self)), key=self.addresses.__getitem__))
        ends = list(map(operator.add, ordered.addresses, ordered.sizes))
        if not all(map(operator.le, ends, ordered.addresses[1:])):
            ordered.fixed = ordered.fixed | _overlapping(ordered.keys, ordered.addresses, ends)
        return ordered

    def _picked(self, pick: Callable[[Sequence[Any]], list[Any]]) -> Storages:
        return Storages(
            pick(self.storages),
            pick(self.keys),
            pick(self.sizes),
            pick(self.addresses),
            pick(self.labels),
            self.fixed,
        )


def _overlapping(keys: Sequence[int], addresses: Sequence[int], ends: Sequence[int]) -> set[int]:
    """Keys of the ranges that share memory with another one; they are in the order of their addresses."""
    found: set[int] = set()
    reach, owner = 0, -1
    for key, address, end in zip(keys, addresses, ends, strict=True):
        if address < reach:
            found |= {key, owner}
        if end > reach:
            reach, owner = end, key
    return found
