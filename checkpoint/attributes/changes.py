"""Changes of the objects reachable from attached ones, described as nodes of a snapshot's tree."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpuslice.checkpoint.discover import live_graphs
from gpuslice.checkpoint.format.nodes import (
    AnyTensorNode,
    AttributesNode,
    ChangeNode,
    KindNode,
    ListNode,
    Node,
    RefNode,
    SharedNode,
    TupleNode,
)
from gpuslice.checkpoint.named import containers
from gpuslice.checkpoint.named.classes import with_article
from gpuslice.checkpoint.named.describe import Describer
from gpuslice.checkpoint.named.generators import Generator
from gpuslice.errors import UsageError

from .kinds import Kind, kind_of
from .parts import MISSING

_SHARED = (list, dict, set, torch.Tensor, np.ndarray, Generator)
_MADE_LATER = "which was made after gpuslice.attach and cannot be made again"
_REMEDY = "make it before gpuslice.attach, or leave it out of the object"


@dataclass(slots=True)
class Change:
    """The changes of one object since it was attached: attributes set, attributes gone, new content.

    Attributes
    ----------
    slots
        Attributes that it has now, or has with another value.
    gone
        Attributes that it had.
    content
        The object itself, if what it holds has changed.
    """

    path: str
    item: Any
    kind: str
    slots: dict[str, Any] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    content: Any = MISSING


class Changes:
    """The attributes of attached objects that a snapshot saves.

    Parameters
    ----------
    changes
        By object.
    holders
        Modules, optimizers and generators that are saved whole, by name.
    names
        The names of the objects that any process of the job has, by ``id``.
    obstacles
        What cannot be saved, by name and reason.

    Attributes
    ----------
    obstacles
        The same, and what turned out not to be describable.
    """

    def __init__(
        self,
        changes: Sequence[Change],
        holders: Mapping[str, object],
        names: Mapping[int, str],
        obstacles: Sequence[str],
    ) -> None:
        self._changes = list(changes)
        self._holders = dict(holders)
        self._names = names
        self.obstacles = [*obstacles, *self._not_describable()]

    def __bool__(self) -> bool:
        return bool(self._changes)

    @property
    def paths(self) -> list[str]:
        """Names of all changed attributes and contents."""
        slots = [
            f"{change.path}.{name}" for change in self._changes for name in (*change.slots, *change.gone)
        ]
        return slots + [change.path for change in self._changes if change.content is not MISSING]

    def describe(self, describer: Describer, path: str) -> Node:
        """Return the changes as a node of a snapshot's tree (``describe.Describable``)."""
        graph = _GraphDescriber(describer, self._names)
        attached = dict(describer.optimized)
        holders = {name: describer.node(item, name) for name, item in self._holders.items()}
        # What an optimizer steps that is not attached is an attribute, too, and saved if it has changed.
        describer.optimized = attached
        return AttributesNode(holders, [self._node(graph, change) for change in self._changes])

    def frozen(self) -> Changes:
        """Return a copy that later changes do not affect, without generators and modules."""
        memo: dict[int, Any] = {}
        for change in self._changes:
            for value in (change.content, *change.slots.values()):
                _keep_known(value, self._names, memo)
        made, lost = [], []
        for change in self._changes:
            try:
                slots = {name: copy.deepcopy(value, memo) for name, value in change.slots.items()}
                content = _copied(change.content, memo)
            except Exception as error:  # noqa: BLE001 - each class fails to be copied in its own way
                lost.append(f"{change.path} holds what cannot be copied: {error}")
                continue
            made.append(Change(change.path, None, change.kind, slots, change.gone, content))
        return Changes(made, {}, self._names, [*self.obstacles, *lost])

    def _not_describable(self) -> list[str]:
        trial, found = Describer(), []
        graph = _GraphDescriber(trial, self._names)
        for change in self._changes:
            for name, value in change.slots.items():
                found += _failure(lambda value=value, at=f"{change.path}.{name}": graph.node(value, at))
            if change.content is not MISSING:
                found += _failure(lambda change=change: graph.content(change.content, change.path))
        for name, item in self._holders.items():
            found += _failure(lambda name=name, item=item: trial.node(item, name))
        return found + trial.unsaved

    def _node(self, graph: _GraphDescriber, change: Change) -> ChangeNode:
        slots = {name: graph.node(value, f"{change.path}.{name}") for name, value in change.slots.items()}
        content = None if change.content is MISSING else graph.content(change.content, change.path)
        return ChangeNode(change.path, change.kind, slots, change.gone, content)


class _GraphDescriber(Describer):
    """Describes values that refer to named objects, to each other, and to themselves."""

    def __init__(self, describer: Describer, names: Mapping[int, str]) -> None:
        super().__init__()
        self.tensors, self.covered, self.optimized = describer.tensors, describer.covered, describer.optimized
        self.unsaved = describer.unsaved
        self._names = names
        self._plain = describer
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []

    def _node(self, value: Any, path: str) -> Node:
        name = self._names.get(id(value))
        if name is not None:
            return RefNode(name)
        kind, is_data = kind_of(value), containers.is_data_object(value)
        if kind in (Kind.MODULE, Kind.OPTIMIZER, Kind.STATEFUL, Kind.OBJECT) and not is_data:
            raise UsageError(f"{path} is {_named(value)}, {_MADE_LATER}", _REMEDY)
        if kind in (Kind.OPAQUE, Kind.FUNCTION, Kind.CLASS, Kind.IGNORED):
            raise UsageError(f"{path} is {_named(value)}, which cannot be saved", _REMEDY)
        if not isinstance(value, _SHARED) and not is_data:
            return super()._node(value, path)
        number = self._numbers.get(id(value))
        if number is not None:
            return SharedNode(number, None)
        number = self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if containers.has_own_factory(value):
            raise UsageError(f"{path} is a default dictionary of a function, {_MADE_LATER}", _REMEDY)
        if isinstance(value, Generator):
            return SharedNode(number, self._plain.node(value, path))
        node = super()._node(value, path)
        if type(value) is dict and isinstance(node, ListNode):
            node = KindNode("dict", "", node)
        return SharedNode(number, node)

    def tensor(self, tensor: torch.Tensor, path: str) -> AnyTensorNode:
        """Return the node of a tensor; its values only, if its graph was run backward."""
        if tensor.grad_fn is not None and not tensor.is_leaf and live_graphs.is_spent(tensor):
            return super().tensor(tensor.detach(), path)
        return super().tensor(tensor, path)

    def mapping(self, mapping: Mapping[Any, Any], path: str) -> Any:
        """Return the node of a dictionary's items; pairs if its keys are objects."""
        ids = [key for key in mapping if type(key) is int and key in self._names]
        if ids:
            what = self._names[ids[0]]
            raise UsageError(f"{path} has the id() of {what} as a key", "use the object itself as the key")
        if all(map(_is_plain_key, mapping)):
            return super().mapping(mapping, path)
        return ListNode(
            [
                TupleNode([self.node(key, f"a key of {path}"), self.node(value, f"{path}[...]")])
                for key, value in mapping.items()
            ]
        )

    def content(self, value: Any, path: str) -> Node:
        """Return the node of what a named object contains."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        node = super()._node(value, path)
        if isinstance(node, KindNode):
            return node.data
        return node


def _is_plain_key(key: object) -> bool:
    return all(map(_is_plain_key, key)) if type(key) is tuple else kind_of(key) is Kind.LEAF


def _named(value: object) -> str:
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return f"the function {value.__qualname__}"
    return with_article(value)


def _failure(describe: Any) -> list[str]:
    try:
        describe()
    except UsageError as error:
        return [error.message]
    return []


def _copied(content: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a container's content. References to the container itself are not copied."""
    if content is MISSING:
        return content
    if isinstance(content, (torch.Tensor, np.ndarray)):
        return copy.deepcopy(content)
    made = copy.copy(content)
    items = copy.deepcopy(list(content.items()) if isinstance(content, dict) else list(content), memo)
    made.clear()
    made.update(items) if isinstance(content, (dict, set)) else made.extend(items)
    return made


def _keep_known(value: Any, names: Mapping[int, str], memo: dict[int, Any]) -> None:
    """Make a deep copy with ``memo`` keep its references to named objects."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if id(item) in names:
            memo[id(item)] = item
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, types.MappingProxyType)):
            waiting += item
