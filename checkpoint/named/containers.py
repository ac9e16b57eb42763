"""Describe containers and plain data objects by a `KindNode`, and make them again from one.

An existing container is refilled, so that its class, its default factory and all references to it stay.
Otherwise a new one is made without calling its class's own code.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from gpuslice.checkpoint.format.nodes import (
    DictNode,
    KindNode,
    ListNode,
    Node,
    SharedNode,
    TupleNode,
    ValueNode,
)
from gpuslice.errors import RefusedSnapshotError, UsageError

from . import classes
from .plain_objects import attributes, set_attribute

#: Base classes by the name of the kind. The first that fits a value gives its kind.
_KINDS: dict[str, type] = {
    "counter": Counter,
    "defaultdict": defaultdict,
    "ordered dict": OrderedDict,
    "dict": dict,
    "deque": deque,
    "list": list,
    "set": set,
    "frozenset": frozenset,
}
#: Factories of default dictionaries that a file may name.
_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, float, int, str, dict, list, set, tuple)
}


class Describes(Protocol):
    """The interface of the object that describes a container's parts."""

    def node(self, value: Any, path: str) -> Node: ...

    def mapping(self, mapping: Mapping[Any, Any], path: str) -> DictNode | ValueNode: ...

    def items(self, sequence: Sequence[Any], path: str) -> Node: ...


class Filling(NamedTuple):
    """How to make a container and fill it once its content is loaded.

    Attributes
    ----------
    target
        Returns what is to be filled; None if the value can only be made of its whole content.
    fill
        Puts the content into the target and returns the value.
    """

    target: Callable[[], Any] | None
    fill: Callable[[Any, Any, Mapping[str, Any]], Any]


def describe(describer: Describes, value: Any, path: str) -> KindNode | None:
    """Return the node of a container or data object; None if it is neither, or a plain list, tuple or dict.

    Raises
    ------
    UsageError
        If something in it cannot be saved.
    """
    kind = type(value)
    if kind in (list, tuple, dict):
        return None
    if isinstance(value, Enum):
        return KindNode("enum", classes.name_of(kind), ValueNode.of(_member(value, path), path))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return KindNode("named tuple", classes.name_of(kind), describer.items(tuple(value), path))
    if dataclasses.is_dataclass(kind) and not isinstance(value, tuple(_KINDS.values())):
        return KindNode("dataclass", classes.name_of(kind), describer.mapping(attributes(value), path))
    for name, base in _KINDS.items():
        if isinstance(value, base):
            return _container(describer, value, path, name, base)
    return None


def _container(describer: Describes, value: Any, path: str, name: str, base: type) -> KindNode:
    mapping = isinstance(value, dict)
    data = describer.mapping(dict(value), path) if mapping else describer.items(list(value), path)
    own = {} if type(value) is base else attributes(value)
    return KindNode(
        name,
        "" if type(value) is base else classes.name_of(type(value)),
        data,
        ValueNode.of(_detail(value), path),
        describer.mapping(own, path) if own else None,
    )


def _member(value: Enum, path: str) -> str:
    if value.name not in type(value).__members__:
        raise UsageError(f"{path} is {value!r}, no single member of its class", "give a member with a name")
    return value.name


def _detail(value: object) -> Any:
    """Return what a container was made with: a deque's maximum, a default factory's name."""
    if isinstance(value, deque):
        return value.maxlen
    if isinstance(value, defaultdict) and value.default_factory is not None:
        factory = value.default_factory
        return next((name for name, kind in _FACTORIES.items() if kind is factory), "?")
    return None


def has_own_factory(value: object) -> bool:
    """Return True for a default dictionary whose factory only the live object knows."""
    return isinstance(value, defaultdict) and _detail(value) == "?"


def filling(node: KindNode, live: Any, path: str) -> Filling:
    """Return how to make the value that a node describes.

    Raises
    ------
    RefusedSnapshotError
        If the kind or its class is not known here; nothing has changed.
    """
    data = node.kind in ("enum", "named tuple", "dataclass")
    if not data and node.kind not in _KINDS:
        raise RefusedSnapshotError(f"{path} was saved as a {node.kind}, which this version does not know")
    kind: Any = classes.find(node.name, live, path) if node.name else _KINDS.get(node.kind)
    base = {"enum": Enum, "named tuple": tuple}.get(node.kind) or _KINDS.get(node.kind, object)
    if kind is None or not issubclass(kind, base):
        raise RefusedSnapshotError(f"{path} was saved as a {node.kind}, but {node.name!r} is none")
    _check_content(node, kind, path)
    if node.kind == "enum":
        return Filling(None, lambda _, name, __: kind.__members__[name])
    if node.kind == "named tuple":
        return Filling(None, lambda _, items, __: tuple.__new__(kind, items))
    if node.kind == "frozenset":
        return Filling(None, lambda _, items, __: kind.__new__(kind, items))
    same = type(live) is kind
    if node.kind == "dataclass":
        frozen = getattr(kind, "__dataclass_params__").frozen  # noqa: B009 - not every class has it
        return Filling(lambda: live if same and not frozen else object.__new__(kind), _fill_object)
    detail = None if node.detail is None else node.detail.value()
    if not same:
        _check_factory(node.kind, detail, path)
    return Filling(lambda: live if same else _made(kind, node.kind, detail), fill)


def known_parts(node: KindNode, live: Any) -> Any:
    """Return what a live object holds, to be loaded in place where it fits: a new dict or list, or None."""
    if node.kind == "dataclass":
        return attributes(live)
    if isinstance(live, Mapping):
        return dict(live)
    return list(live) if isinstance(live, (list, tuple, deque)) else None


def _check_content(node: KindNode, kind: Any, path: str) -> None:
    """Raise ``RefusedSnapshotError`` for content that the kind cannot have: files are not trusted."""
    data, own = node.data, node.attributes
    if node.kind == "enum":
        good = _value(data) in kind.__members__
    elif node.kind == "named tuple":
        good = hasattr(kind, "_fields") and _length(data) == len(kind._fields)
    elif node.kind == "dataclass":
        good = _is_named(data)
    elif issubclass(kind, dict):
        good = _keys(data) is not None or _is_pairs(data)
    else:
        good = _length(data) is not None
    if issubclass(kind, (set, frozenset)):
        good = good and all(map(_can_be_key, _parts(data)))
    if node.kind == "deque":
        limit = None if node.detail is None else node.detail.value()
        good = good and (limit is None or (type(limit) is int and 0 <= limit < 2**62))
    if not good or (own is not None and not _is_named(own)):
        raise RefusedSnapshotError(f"{path} was saved as a {node.kind} with a content that it cannot have")


def _value(node: Node) -> Any:
    return node.value() if isinstance(node, ValueNode) else None


def _keys(node: Node) -> Sequence[Any] | None:
    value = _value(node)
    return node.keys if isinstance(node, DictNode) else list(value) if isinstance(value, dict) else None


def _is_pairs(node: Node) -> bool:
    """Return True if a dictionary's items are saved as pairs, because its keys are objects."""
    pairs = node.items if isinstance(node, ListNode) else [node]
    return all(
        isinstance(pair, TupleNode) and len(pair.items) == 2 and _can_be_key(pair.items[0]) for pair in pairs
    )


def _is_named(node: Node) -> bool:
    keys = _keys(node)
    return keys is not None and all(isinstance(key, str) for key in keys)


def _parts(node: Node) -> Sequence[Any]:
    """Return the items of a list or tuple: nodes, or values."""
    return node.items if isinstance(node, (ListNode, TupleNode)) else _value(node)


def _length(node: Node) -> int | None:
    parts = _parts(node)
    return len(parts) if isinstance(parts, (list, tuple)) else None


def _can_be_key(part: Any) -> bool:
    """Return True if an item, a node or a value, is hashable, so that a set can contain it."""
    if isinstance(part, SharedNode):
        return part.data is None or _can_be_key(part.data)
    if isinstance(part, KindNode):
        return part.kind in ("enum", "named tuple", "frozenset")
    if isinstance(part, (ListNode, DictNode, TupleNode)):
        return isinstance(part, TupleNode) and all(map(_can_be_key, part.items))
    value = part.value() if isinstance(part, ValueNode) else part
    return all(map(_can_be_key, value)) if isinstance(value, tuple) else not isinstance(value, (list, dict))


def _check_factory(kind: str, detail: Any, path: str) -> None:
    if kind == "defaultdict" and detail is not None and detail not in _FACTORIES:
        raise RefusedSnapshotError(
            f"{path} is a default dictionary whose factory no file can name",
            "create it before gpuslice.attach",
        )


def _made(kind: Any, name: str, detail: Any) -> Any:
    made = kind.__new__(kind)
    if name == "deque":
        deque.__init__(made, (), detail)
    elif name == "defaultdict":
        defaultdict.__init__(made, _FACTORIES.get(detail))
    return made


def fill(target: Any, content: Any, own: Mapping[str, Any]) -> Any:
    """Replace what a container holds; the class's own methods are not called."""
    if isinstance(target, OrderedDict):
        OrderedDict.clear(target)
        for key, item in dict(content).items():
            OrderedDict.__setitem__(target, key, item)
    elif isinstance(target, dict):
        dict.clear(target)
        dict.update(target, content)
    elif isinstance(target, deque):
        deque.clear(target)
        deque.extend(target, content)
    elif isinstance(target, set):
        set.clear(target)
        set.update(target, _each(content))
    else:
        list.clear(target)
        list.extend(target, content)
    for name, value in own.items():
        set_attribute(target, name, value)
    return target


def _fill_object(target: Any, content: Mapping[str, Any], _own: Mapping[str, Any]) -> Any:
    for name, value in content.items():
        set_attribute(target, name, value)
    return target


def _each(items: Iterable[Any]) -> Iterable[Any]:
    """Return an iterator over the items: updated from a collection, a set may take over its order."""
    return iter(items)


def is_data_object(value: object) -> bool:
    """Return True if an object of this class can be described by its content alone."""
    kind = type(value)
    if isinstance(value, (*_KINDS.values(), tuple, Enum)):
        return True
    return dataclasses.is_dataclass(kind) and classes.is_plain_data(kind)


def refill(live: Any, value: Any) -> Any:
    """Put a loaded container into the live one, so that its type and all references to it stay."""
    if isinstance(live, MutableMapping) and isinstance(value, dict):
        live.clear()
        live.update(value)
        return live
    if isinstance(live, MutableSequence) and isinstance(value, list):
        live.clear()
        live.extend(value)
        return live
    if isinstance(live, tuple) and isinstance(value, tuple) and hasattr(live, "_fields"):
        return type(live)(*value)
    return value
