"""Objects reachable from others when those were attached: what has changed since, and how to revert it."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuslice.checkpoint.format.nodes import Node
from gpuslice.checkpoint.named.classes import name_of, with_article
from gpuslice.checkpoint.named.load import Checker, Load

from . import marks, parts, restore
from .changes import Change, Changes
from .kinds import Kind, kind_of
from .parts import MISSING
from .walk import Found, Walk

_MUTABLE = (list, dict, set, deque)
_METHODS = (types.MethodType, types.BuiltinMethodType)


class _Weak:
    """A weak reference to a tensor or array, so that a comparison does not keep it alive."""

    __slots__ = ("get",)

    def __init__(self, item: Any) -> None:
        self.get = weakref.ref(item)


def _kept(value: Any) -> Any:
    return _Weak(value) if isinstance(value, (torch.Tensor, np.ndarray)) else value


def _given(kept: Any) -> Any:
    return kept.get() if type(kept) is _Weak else kept


def _is_same(kept: Any, value: Any) -> bool:
    """Return True if a value is the recorded one, or an equal one that nothing can tell from it."""
    kept = _given(kept)
    if kept is value:
        return True
    kind = type(value)
    if type(kept) is not kind:
        return False
    if kind in (float, complex):
        return repr(kept) == repr(value)
    its = kind_of(value)
    if its is Kind.LEAF:
        return bool(kept == value)
    return its is Kind.IGNORED or (kind in _METHODS and kept == value)


@dataclass(slots=True)
class _Known:
    """The recorded state of an object."""

    path: str
    kind: Kind
    data: bool
    carried: bool
    kept: Any
    slots: dict[str, Any]
    items: Sequence[Any] | None
    columns: marks.Columns | None
    mark: object
    containers: Mapping[str, Any]

    @classmethod
    def of(cls, found: Found, *, weak: bool) -> _Known:
        items, columns = None, None
        if isinstance(found.item, _MUTABLE) and not found.carried:
            columns = found.columns
            items = [] if columns else [*map(_kept, parts.items(found.item))]
        slots = {name: _kept(value) for name, value in found.slots.items()}
        mark = None if found.carried and found.kind is not Kind.GENERATOR else _mark(found)
        kept = _Weak(found.item) if weak else _kept(found.item)
        own = parts.containers_of(found.item)
        return cls(found.path, found.kind, found.data, found.carried, kept, slots, items, columns, mark, own)

    @property
    def item(self) -> Any:
        return _given(self.kept)


def _mark(found: Found) -> object:
    if found.kind is Kind.TENSOR:
        return marks.of_tensor(found.item, data=found.data)
    if found.kind is Kind.ARRAY:
        return marks.of_array(found.item, data=found.data)
    if found.kind is Kind.GENERATOR:
        return marks.of_generator(found.item)
    return marks.of_opaque(found.item) if found.kind is Kind.OPAQUE else None


class KnownAttributes:
    """The recorded state of all objects that were reachable from some objects when it was made.

    Parameters
    ----------
    roots
        The objects by name.
    weak
        True if these must not be kept alive.
    """

    def __init__(self, roots: Mapping[str, object], *, weak: bool = False) -> None:
        self.roots = frozenset(roots)
        walk = Walk(roots, lambda item: None, lambda item: None)
        self._complete = walk.complete
        self._known = {
            key: _Known.of(found, weak=weak and found.path in roots) for key, found in walk.found.items()
        }
        self._by_path = {known.path: known for known in self._known.values()}
        self._holders = [found.path for found in walk.holders]

    def name_of(self, item: object) -> str | None:
        """Return the recorded name of an object, or None."""
        known = self._known.get(id(item))
        return known.path if known is not None and known.item is item else None

    def _columns_of(self, item: object) -> marks.Columns | None:
        known = self._known.get(id(item))
        return known.columns if known is not None and known.item is item else None

    @property
    def objects(self) -> list[Any]:
        """All recorded objects that still exist."""
        return [item for known in self._known.values() if (item := known.item) is not None]

    def item(self, path: str) -> Any:
        """Return the object with a recorded name; None if there is none, or it is gone."""
        known = self._by_path.get(path)
        return None if known is None else known.item

    def changes(self, roots: Mapping[str, object]) -> Changes:
        """Return the changes of all objects reachable from ``roots`` since they were recorded."""
        walk = Walk(roots, self.name_of, self._columns_of)
        comparison = _Comparison(self._known, walk)
        changes = [*comparison.changes()]
        holders = {}
        for found in walk.holders:
            known = comparison.known(found.item)
            if known is not None:
                holders[known.path] = found.item
        names = {key: known.path for key, known in self._known.items() if known.item is not None}
        names |= {key: known.path for key, known in comparison.replaced.items()}
        obstacles = list(comparison.obstacles)
        if not walk.complete:
            obstacles.append(f"more than {len(walk.found):,} objects are reachable from attached ones")
        return Changes(changes, holders, names, obstacles)

    def compare(self, checker: Checker, node: Node, _path: str) -> Load:
        """Compare a snapshot's changes with the live objects. Return a function that loads the changes."""
        return restore.compare(self, checker, node)

    def revert(self, roots: Mapping[str, object]) -> None:
        """Restore the changed attributes of these objects, as far as possible."""
        comparison = _Comparison(self._known, Walk(roots, self.name_of, self._columns_of))
        for change in comparison.changes():
            known = comparison.known(change.item)
            if known is not None:
                _revert(known, change)

    def rejoin(self) -> None:
        """Make attributes refer to recorded objects again where similar new objects took their place.

        An optimizer's ``load_state_dict`` makes new containers, which no other object shares with it.
        """
        for known in self._known.values():
            item = known.item
            if item is None or not known.slots:
                continue
            now = parts.slots(item, known.kind) | parts.containers_of(item)
            for name, kept in known.slots.items():
                self._join(item, name, _given(kept), now.get(name, MISSING))
            for name, was in known.containers.items():
                self._join(item, name, was, now[name])

    def _join(self, item: Any, name: str, was: Any, value: Any) -> None:
        if was is value or type(was) is not type(value) or self.name_of(value) is not None:
            return
        if kind_of(was) in (Kind.CONTAINER, Kind.OBJECT, Kind.OPTIMIZER):
            parts.set_slot(item, name, was)


class _Comparison:
    """A comparison of recorded objects with a walk through the present ones.

    Attributes
    ----------
    replaced
        The recorded object that each new one of the same class has replaced, by the new one's ``id``.
    """

    def __init__(self, known: Mapping[int, _Known], walk: Walk) -> None:
        self._known, self._walk = known, walk
        self.replaced: dict[int, _Known] = {}
        self.obstacles: list[str] = []

    def known(self, item: object) -> _Known | None:
        """Return the record of an object, or of the object that it has replaced."""
        known = self.replaced.get(id(item)) or self._known.get(id(item))
        return known if known is not None and (known.item is item or id(item) in self.replaced) else None

    def changes(self) -> Iterator[Change]:
        """Yield the changes of each recorded object that has changed."""
        for found in self._walk.found.values():
            known = self.known(found.item)
            if known is not None and found.kind is Kind.GENERATOR and _mark(found) != known.mark:
                self.obstacles.append(f"{found.path} has spawned generators, which cannot be saved")
            if known is None or found.carried or known.carried:
                continue
            change = self._slots(known, found)
            change.content = self._content(known, found)
            if change.slots or change.gone or change.content is not MISSING:
                yield change

    def _slots(self, known: _Known, found: Found) -> Change:
        whole = id(found.item) in self.replaced
        change = Change(known.path, found.item, name_of(type(found.item)))
        for name, value in found.slots.items():
            kept = known.slots.get(name, MISSING)
            if not whole and _is_same(kept, value):
                continue
            self._note_replacement(_given(kept), value)
            if value is MISSING:
                change.gone.append(name)
            elif kind_of(value) is not Kind.IGNORED:
                change.slots[name] = value
        change.gone += [name for name in known.slots if name not in found.slots]
        return change

    def _note_replacement(self, was: Any, value: Any) -> None:
        """Match a new object with the recorded one in its place, if that is reachable nowhere else."""
        if type(was) is not type(value) or id(was) in self._walk.found or id(value) in self._known:
            return
        known = self._known.get(id(was))
        if known is not None and kind_of(value) in (Kind.OBJECT, Kind.MODULE, Kind.OPTIMIZER, Kind.STATEFUL):
            self.replaced[id(value)] = known

    def _content(self, known: _Known, found: Found) -> Any:
        """Return the content of a container, tensor or array if it has changed; else MISSING."""
        item = found.item
        if known.items is not None:
            return MISSING if self._same_items(known, found) else item
        if found.kind in (Kind.TENSOR, Kind.ARRAY) and id(item) not in self.replaced:
            return MISSING if _mark(found) == known.mark else item
        if found.kind is Kind.OPAQUE:
            self._see(known, found)
        return MISSING

    def _same_items(self, known: _Known, found: Found) -> bool:
        if known.columns is not None or found.columns is not None:
            return known.columns is not None and found.columns == known.columns
        now = parts.items(found.item)
        assert known.items is not None
        same = len(now) == len(known.items)
        if same:
            pairs = [pair for pair in zip(known.items, now, strict=True) if not _is_same(*pair)]
            for was, value in pairs:
                self._note_replacement(_given(was), value)
            same = not pairs
        return same

    def _see(self, known: _Known, found: Found) -> None:
        mark = _mark(found)
        what = f"{found.path} is {with_article(found.item)}"
        if isinstance(mark, marks.Unknowable):
            if not (found.data and marks.is_foreign(found.item)):
                self.obstacles.append(f"{what}, whose state cannot be seen")
        elif mark != known.mark:
            self.obstacles.append(f"{what}, which has changed and cannot be saved")


def _revert(known: _Known, change: Change) -> None:
    for name in (*change.slots, *change.gone):
        was = _given(known.slots.get(name, MISSING))
        if was is MISSING:
            parts.delete_slot(change.item, name)
        elif was is not None or known.slots[name] is None:
            parts.set_slot(change.item, name, was)
    if known.items is not None and change.content is not MISSING:
        columns = known.columns
        items = columns.values[0] if columns is not None else [*map(_given, known.items)]
        parts.refill(change.item, items)
