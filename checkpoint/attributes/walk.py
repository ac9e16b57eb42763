"""A walk through all objects reachable from attached ones: each object once, with a short name.

Objects of data sets are visited last. So an object that other code holds, too, does not count as data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuslice.checkpoint.named.describe import keeps_own_state_dict, named_tensors, unwrapped
from gpuslice.checkpoint.named.plain_objects import attributes

from . import marks, parts
from .kinds import LEAVES, Kind, is_data, kind_of

#: Containers larger than this are compared as a whole, if they hold plain values only.
LARGE = 256
#: Items of containers larger than the first are compared by identity only. A walk over more objects stops.
MOST_ITEMS, MOST_OBJECTS = 10_000, 500_000

_WITH_SLOTS = (Kind.MODULE, Kind.OPTIMIZER, Kind.OBJECT, Kind.FUNCTION, Kind.CLASS)
_WITH_CLASS = (Kind.MODULE, Kind.OPTIMIZER, Kind.OBJECT, Kind.CONTAINER, Kind.STATEFUL)
_EXACT = (list, tuple, dict, set, frozenset, deque)


@dataclass(slots=True)
class Found:
    """An object that `Walk` has found, and the name by which it was reached.

    Attributes
    ----------
    path
        Its name: ``optimizer.inner``.
    data
        True if only data sets hold it.
    carried
        True if attaching alone saves it: a parameter, the groups of an optimizer.
    slots
        Its attributes.
    columns
        The mark of a large container of plain values.
    """

    path: str
    item: Any
    kind: Kind
    data: bool = False
    carried: bool = False
    slots: Mapping[str, Any] = field(default_factory=dict)
    columns: marks.Columns | None = None


class Walk:
    """All objects reachable from some objects.

    Parameters
    ----------
    roots
        The attached objects by name.
    name_of
        Returns the name that an object had in an earlier walk, if it had one.
    columns_of
        Returns the mark that a large container had then.

    Attributes
    ----------
    found
        By ``id``, in the order of the walk.
    holders
        Modules, optimizers, generators and the like that are not attached themselves.
    complete
        True if the walk reached all objects; False if there were too many.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        name_of: Callable[[object], str | None],
        columns_of: Callable[[object], marks.Columns | None],
    ) -> None:
        self._columns_of = columns_of
        self.found: dict[int, Found] = {}
        self.holders: list[Found] = []
        self.complete = True
        self._name_of = name_of
        self._covered: set[int] = set()
        self._waiting: deque[tuple[str, Any]] = deque()
        self._data: deque[tuple[str, Any]] = deque()
        attached = [pair for name, item in roots.items() for pair in self._attached(name, item)]
        self._roots = {id(item) for _, item in attached}
        # A model's tensors have the model's names, whatever else refers to them.
        for name, item in attached:
            if isinstance(item, torch.nn.Module):
                self._carry_module(name, item)
        for name, item in attached:
            (self._data if is_data(None, name, item) else self._waiting).append((name, item))
        for queue in (self._waiting, self._data):
            while queue:
                self._visit(*queue.popleft(), data=queue is self._data)

    def _attached(self, name: str, item: Any) -> Iterator[tuple[str, Any]]:
        """Yield an attached object, or the items of a container, which count as attached, too."""
        if kind_of(item) is not Kind.CONTAINER:
            yield name, item
            return
        self._note(Found(name, item, Kind.CONTAINER, carried=True))
        if len(item) <= MOST_ITEMS:
            for label, part in parts.labelled(item):
                if type(part) not in LEAVES and id(part) not in self.found:
                    yield from self._attached(f"{name}{label}", part)

    def _note(self, found: Found) -> None:
        found.path = self._name_of(found.item) or found.path
        self.found.setdefault(id(found.item), found)

    def _visit(self, path: str, item: Any, *, data: bool) -> None:
        if id(item) in self.found:
            return
        kind = kind_of(item)
        if kind in (Kind.LEAF, Kind.IGNORED):
            return
        if len(self.found) >= MOST_OBJECTS:
            self.complete = False
            return
        root = id(item) in self._roots
        state = kind in (Kind.TENSOR, Kind.ARRAY, Kind.GENERATOR)
        found = Found(path, item, kind, data, carried=root and state)
        self._note(found)
        if not root and self._is_holder(found):
            self.holders.append(found)
        if kind in _WITH_SLOTS or (kind is Kind.CONTAINER and type(item) not in _EXACT):
            found.slots = parts.slots(item, kind)
        elif kind is Kind.OPAQUE:
            found.slots = attributes(item)
        if kind is Kind.OPTIMIZER and not keeps_own_state_dict(item):
            self._carry_optimizer(found.path, item, root=root)
        self._look_into(found)

    def _is_holder(self, found: Found) -> bool:
        if found.kind is Kind.MODULE:
            alone = id(found.item) not in self._covered
            if alone:
                self._carry_module(found.path, found.item)
            return alone
        if found.kind is Kind.OPTIMIZER:
            return not keeps_own_state_dict(found.item)
        return found.kind in (Kind.GENERATOR, Kind.STATEFUL)

    def _look_into(self, found: Found) -> None:
        item = found.item
        for name, value in found.slots.items():
            self._enter(f"{found.path}.{name}", value, data=found.data or is_data(item, name, value))
        if found.kind in _WITH_CLASS and type(item) not in _EXACT:
            for label, value in parts.held_unseen(item):
                self._enter(f"{found.path}{label}", value, data=found.data)
        if found.kind is Kind.CONTAINER:
            if len(item) > LARGE:
                found.columns = marks.items_mark(parts.items(item), self._columns_of(item))
            if found.columns is None and len(item) <= MOST_ITEMS:
                for label, value in parts.labelled(item):
                    self._enter(f"{found.path}{label}", value, data=found.data or is_data(None, "", value))

    def _enter(self, path: str, value: Any, *, data: bool) -> None:
        if type(value) not in LEAVES and id(value) not in self.found:
            (self._data if data else self._waiting).append((path, value))

    def _carry_module(self, path: str, module: torch.nn.Module) -> None:
        whole = unwrapped(module)
        self._covered.update(map(id, (module, *module.modules())))
        for name, tensor in named_tensors(whole).items():
            self._note(Found(f"{path}.{name}", tensor, Kind.TENSOR, carried=True))

    def _carry_optimizer(self, path: str, optimizer: torch.optim.Optimizer, *, root: bool) -> None:
        groups = f"{path}.param_groups"
        self._note(Found(f"{path}.state", optimizer.state, Kind.CONTAINER, carried=True))
        self._note(Found(groups, optimizer.param_groups, Kind.CONTAINER, carried=True))
        for index, group in enumerate(optimizer.param_groups):
            at = f"{groups}[{index}]"
            self._note(Found(at, group, Kind.CONTAINER, carried=True))
            self._note(Found(f"{at}['params']", group["params"], Kind.CONTAINER, carried=True))
            for number, parameter in enumerate(group["params"]):
                name = f"{at}['params'][{number}]"
                if root:
                    self._note(Found(name, parameter, Kind.TENSOR, carried=True))
                else:
                    self._enter(name, parameter, data=False)
