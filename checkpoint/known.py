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


@dataclass(slots=True)
class Known:
    """Columns of the tensors of the last look that still live, which are the first ones of every later look.

    Only what stays the same as long as the Python objects are the same is taken from here: that a tensor is a
    plain one, whose storage's device is, and the storage's key; and for people the label that it had when it
    was asked. That the tensors are the same `heap` says; storages are known by weak references, for an
    address proves nothing.
    """

    kinds: list[type] = field(default_factory=list)
    #: Of a tensor that has to be asked again, what is no storage.
    storages: list[Callable[[], torch.UntypedStorage | None]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ours: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kinds)

    def keep(self, alive: Sequence[bool]) -> None:
        """Forget the tensors that are gone."""
        for column in self._columns:
            column[:] = compress(column, alive)

    def under(self, start: int, tensors: Sequence[torch.Tensor]) -> Under | None:
        """What is under the tensors from place ``start`` on, if each is over the same storage as then."""
        rows = slice(start, start + len(tensors))
        kinds = self.kinds[rows]
        if len(kinds) < len(tensors) or kinds != list(map(type, tensors)):
            return None
        with suppress(RuntimeError, NotImplementedError):  # one of them has no storage
            storages = list(map(_untyped_storage, tensors))
            if all(map(is_, storages, map(_call, self.storages[rows]))):
                sizes = list(map(_nbytes, storages))
                if sizes == self.sizes[rows]:
                    return Under(storages, self.keys[rows], sizes, self.labels[rows], self.ours[rows])
        return None

    def learn(self, start: int, tensors: Sequence[torch.Tensor], under: Under | None) -> None:
        """For the next look: what was found under them, one storage under each; or nothing of use."""
        rows, count = slice(start, start + len(tensors)), len(tensors)
        row: tuple[Iterable[Any], ...]
        if under is None:
            row = [_nothing] * count, [0] * count, [0] * count, [""] * count, [False] * count
        else:
            row = map(weakref.ref, under.storages), under.keys, under.sizes, under.labels, under.ours
        for column, of_rows in zip(self._columns, (map(type, tensors), *row), strict=True):
            column[rows] = of_rows

    def references(self) -> list[object]:
        """The weak references."""
        return [*self.storages]

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return (self.kinds, self.storages, self.keys, self.sizes, self.labels, self.ours)


def _nothing() -> None:
    """No storage."""
