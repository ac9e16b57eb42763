"""What the last look found under tensors: the same tensor over the same storage need not be asked again."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, is_
from typing import Any

import torch

from .columns import Pick, firsts, picker

_call: Callable[[Callable[[], Any]], Any] = operator.call
_cdata, _nbytes = attrgetter("_cdata"), torch.UntypedStorage.nbytes
_untyped_storage = torch._C.TensorBase.untyped_storage


@dataclass(slots=True)
class Under:
    """Storages under tensors: their keys (``_cdata``), bytes, labels, and whether they are the device's."""

    storages: Sequence[torch.UntypedStorage]
    keys: Sequence[int]
    sizes: Sequence[int]
    labels: Sequence[str]
    ours: Sequence[bool]

    @classmethod
    def of(
        cls, storages: Sequence[torch.UntypedStorage], labels: Sequence[str], ours: Sequence[bool]
    ) -> Under:
        return cls(storages, list(map(_cdata, storages)), list(map(_nbytes, storages)), labels, ours)


@dataclass(frozen=True, slots=True)
class Settled:
    """The device's storages that are not empty, each once: what picks them out of the rows, and columns."""

    pick: Pick
    keys: list[int]
    sizes: list[int]
    labels: list[str]


@dataclass(slots=True)
class Known:
    """Columns with a row for each tensor of the last look that lives; these come first in every later look.

    Only what stays the same as long as the Python objects are the same is taken from here: that a tensor is a
    plain one, whose storage's device is, and the storage's key; and for people the label that it had when it
    was asked. That the tensors are the same `heap` says. Storages are known by weak references: an address
    proves nothing.
    """

    kinds: list[type] = field(default_factory=list)
    #: Of a tensor that has to be asked again, what is no storage.
    storages: list[Callable[[], torch.UntypedStorage | None]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ours: list[bool] = field(default_factory=list)
    #: What follows from the rows, until one changes; references to storages all of which are in rows.
    _settled: Settled | None = None
    _covered: list[object] | None = None

    def __len__(self) -> int:
        return len(self.kinds)

    def keep(self, alive: Sequence[bool]) -> None:
        """Forget the tensors that are gone."""
        self._settled = self._covered = None
        for column in self._columns:
            column[:] = compress(column, alive)

    def same(self, start: int, tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage] | None:
        """What is under the tensors from place ``start`` on, if each is over the same storage as then."""
        rows = slice(start, start + len(tensors))
        kinds = self.kinds[rows]
        if len(kinds) < len(tensors) or kinds != list(map(type, tensors)):
            return None
        with suppress(RuntimeError, NotImplementedError):  # one of them has no storage
            storages = list(map(_untyped_storage, tensors))
            same = all(map(is_, storages, map(_call, self.storages[rows])))
            if same and list(map(_nbytes, storages)) == self.sizes[rows]:
                return storages
        return None

    def learn(self, start: int, tensors: Sequence[torch.Tensor], under: Under | None) -> None:
        """For the next look: what was found under them, one storage under each; or nothing of use."""
        rows, count = slice(start, start + len(tensors)), len(tensors)
        row: tuple[Iterable[Any], ...]
        if under is None:
            row = [_nothing] * count, [0] * count, [0] * count, [""] * count, [False] * count
        else:
            row = map(weakref.ref, under.storages), under.keys, under.sizes, under.labels, under.ours
        self._settled = self._covered = None
        for column, of_rows in zip(self._columns, (map(type, tensors), *row), strict=True):
            column[rows] = of_rows

    def settled(self) -> Settled:
        """What follows from the rows."""
        if self._settled is None:
            rows = list(compress(range(len(self)), map(operator.mul, self.sizes, self.ours)))
            keys = picker(rows)(self.keys)
            if len(set(keys)) < len(keys):
                rows = picker(firsts(keys))(rows)
            pick = picker(rows)
            self._settled = Settled(pick, pick(self.keys), pick(self.sizes), pick(self.labels))
        return self._settled

    def cover(self, references: Sequence[object]) -> None:
        """All of these storages are in rows, and stay there as long as no row changes."""
        self._covered = [*references]

    def covers(self, references: Sequence[object]) -> bool:
        """Whether that is known of them."""
        return references == self._covered

    def references(self) -> list[object]:
        """The weak references."""
        return [*self.storages, *(self._covered or ())]

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return (self.kinds, self.storages, self.keys, self.sizes, self.labels, self.ours)


def _nothing() -> None:
    """No storage."""
