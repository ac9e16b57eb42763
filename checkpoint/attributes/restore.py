"""Restore attributes from a snapshot: compare with the live objects first, then set."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from gpuslice.checkpoint.format.nodes import (
    AnyTensorNode,
    ArrayNode,
    AttributesNode,
    ChangeNode,
    DictNode,
    GeneratorNode,
    KindNode,
    ListNode,
    Node,
    RefNode,
    SharedNode,
    ValueNode,
)
from gpuslice.checkpoint.named import classes, containers
from gpuslice.checkpoint.named.generators import Generator
from gpuslice.checkpoint.named.load import Checker, Load
from gpuslice.checkpoint.named.snapshot_tensors import Maker
from gpuslice.errors import RefusedSnapshotError

from . import parts
from .kinds import kind_of

_REMEDY = "restart the script that wrote the snapshot, or use another job name"
_LEGACY = "numpy legacy "


class Named(Protocol):
    """Live objects by the names that they have in every process of a job."""

    roots: frozenset[str]

    def item(self, path: str) -> Any: ...

    def name_of(self, item: object) -> str | None: ...

    def rejoin(self) -> None: ...


def compare(named: Named, checker: Checker, node: Node) -> Load:
    """Compare a snapshot's attributes with live objects. Return a function that sets them.

    Changes of objects that are not reachable from ``named`` are left out.

    Raises
    ------
    RefusedSnapshotError
        If an object is not there, or is another one; nothing has changed.
    """
    if isinstance(node, ValueNode):
        return _refuse_obstacles(named, node.value())
    if not isinstance(node, AttributesNode):
        raise RefusedSnapshotError("the snapshot has something else in the place of attributes", _REMEDY)
    graph = _GraphChecker(checker, named)
    holders = [
        graph.check(saved, _there(named, path, None), path)
        for path, saved in node.holders.items()
        if _root(path) in named.roots
    ]
    setters = [_setter(graph, named, change) for change in node.changes if _root(change.path) in named.roots]

    def load(maker: Maker) -> None:
        graph.shared.clear()
        named.rejoin()
        for load_holder in holders:
            load_holder(maker)
        for set_ in setters:
            set_(maker)

    return load


def _refuse_obstacles(named: Named, obstacles: Any) -> Load:
    """Raise ``RefusedSnapshotError`` if the snapshot says that it lacks a part of these objects."""
    for obstacle in obstacles if isinstance(obstacles, tuple) else ():
        if _root(str(obstacle).partition(" ")[0]) in named.roots:
            raise RefusedSnapshotError(f"the snapshot lacks something: {obstacle}", _REMEDY)
    return lambda _maker: None


def _root(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def _there(named: Named, path: str, kind: str | None) -> Any:
    item = named.item(path)
    if item is None:
        raise RefusedSnapshotError(f"there is no {path} here, but it was saved", _REMEDY)
    if kind is not None and classes.name_of(type(item)) != kind:
        raise RefusedSnapshotError(f"{path} is a {type(item).__name__} here, but a {kind} was saved", _REMEDY)
    return item


def _setter(graph: _GraphChecker, named: Named, change: ChangeNode) -> Callable[[Maker], object]:
    item = _there(named, change.path, change.kind)
    now = parts.slots(item, kind_of(item))
    slots = {
        name: graph.check(saved, now.get(name), f"{change.path}.{name}")
        for name, saved in change.slots.items()
    }
    content = None if change.content is None else _content(graph, change.content, item, change.path)

    def set_(maker: Maker) -> None:
        for name, load in slots.items():
            parts.set_slot(item, name, load(maker))
        for name in change.gone:
            parts.delete_slot(item, name)
        if content is not None:
            content(maker)

    return set_


def _content(graph: _GraphChecker, node: Node, item: Any, path: str) -> Load:
    """Return a function that loads a named object's content into that object."""
    if isinstance(item, torch.Tensor):
        if not isinstance(node, AnyTensorNode):
            raise RefusedSnapshotError(f"{path} is a tensor here, but was not when saved", _REMEDY)
        return graph.named_tensor(node, item, path)
    if isinstance(item, np.ndarray):
        return _array(graph, node, item, path)
    kind = next((base for base in (dict, list, set, deque) if isinstance(item, base)), None)
    if kind is None or not _fits(node, kind):
        raise RefusedSnapshotError(f"{path} cannot hold what was saved of it", _REMEDY)
    load = graph.check(node, None, path)
    return lambda maker: containers.fill(item, load(maker), {})


def _array(graph: _GraphChecker, node: Node, item: Any, path: str) -> Load:
    if not isinstance(node, ArrayNode):
        raise RefusedSnapshotError(f"{path} is an array here, but was not when saved", _REMEDY)
    load = Checker.check(graph, node, item, path)

    def put(maker: Maker) -> Any:
        values = load(maker)
        if values is not item:
            raise RefusedSnapshotError(f"{path} has another shape or dtype than was saved", _REMEDY)
        return item

    return put


def _fits(node: Node, kind: type) -> bool:
    if kind is dict:
        pairs = isinstance(node, ListNode)
        return pairs or isinstance(node, DictNode) or _holds(node, dict)
    return isinstance(node, ListNode) or _holds(node, list)


def _holds(node: Node, kind: type) -> bool:
    return isinstance(node, ValueNode) and isinstance(node.value(), kind)


class _GraphChecker(Checker):
    """Prepares to load values that refer to named objects, to each other, and to themselves."""

    def __init__(self, checker: Checker, named: Named) -> None:
        super().__init__(checker.source, like=checker)
        self._references = named
        self._numbers: set[int] = set()
        self._taken: dict[int, object] = {}
        #: What has been loaded, by number.
        self.shared: dict[int, Any] = {}

    def free(self, live: Any) -> Any:
        """Return the live object if ``node`` may be loaded into it: it has no name and is not taken yet.

        A restarted pass has made some, to which the sampler's own variables may refer. A tensor may be a view
        of data, so a new one is made.
        """
        if not isinstance(live, (list, dict, set, deque, Generator)):
            return None
        if self._references.name_of(live) is not None or id(live) in self._taken:
            return None
        self._taken[id(live)] = live
        return live

    def check(self, node: Node, live: Any, path: str) -> Load:
        """Return a function that loads ``node``."""
        if isinstance(node, RefNode):
            item = _there(self._references, node.path, None)
            return lambda _maker: item
        if isinstance(node, SharedNode):
            return self._shared(node, self.free(live), path)
        if isinstance(node, (AnyTensorNode, ArrayNode)):
            live = None
        if isinstance(node, GeneratorNode) and live is None:
            return super().check(node, _new_generator(node.library, path), path)
        return super().check(node, live, path)

    def _shared(self, node: SharedNode, live: Any, path: str) -> Load:
        number, shared = node.number, self.shared
        if node.data is None:
            if number not in self._numbers:
                raise RefusedSnapshotError(f"{path} refers to something that was not saved before it")
            return lambda _maker: shared[number]
        self._numbers.add(number)
        made = self._being_filled(node.data, live, path)
        if made is not None:
            return lambda maker: made(maker, lambda target: shared.__setitem__(number, target))
        load = self.check(node.data, live, path)

        def once(maker: Maker) -> Any:
            shared[number] = value = load(maker)
            return value

        return once

    def _being_filled(
        self, node: Node, live: Any, path: str
    ) -> Callable[[Maker, Callable[[Any], object]], Any] | None:
        """Return a function that makes a container, announces it, then fills it: items may refer to it."""
        if isinstance(node, KindNode):
            filling = containers.filling(node, live, path)
            content, own = self.content(node, live, path)
            target, fill = filling.target, filling.fill
        elif isinstance(node, (ListNode, DictNode)):
            kind: Any = list if isinstance(node, ListNode) else dict
            target, fill = (lambda: live if type(live) is kind else kind()), containers.fill
            known = kind(live) if type(live) is kind else None  # a copy: what is loaded must be another list
            content, own = self.check(node, known, path), _nothing
        else:
            return None
        if target is None:
            return None

        def load(maker: Maker, announce: Callable[[Any], object]) -> Any:
            made = target()
            announce(made)
            return fill(made, content(maker), own(maker))

        return load


def _nothing(_maker: Maker) -> Mapping[str, Any]:
    return {}


def _new_generator(library: str, path: str) -> Generator:
    """Return a new generator of the kind that a snapshot names."""
    name = library.removeprefix("numpy ").removeprefix("legacy ")
    if library == "random":
        return random.Random()
    if library.startswith("torch "):
        return torch.Generator(library.removeprefix("torch "))
    bits = getattr(np.random, name, None)
    if not isinstance(bits, type) or not issubclass(bits, np.random.BitGenerator):
        raise RefusedSnapshotError(f"{path} was saved as a generator of {library!r}, which is not known")
    made = bits()
    return np.random.RandomState(made) if library.startswith(_LEGACY) else np.random.Generator(made)
