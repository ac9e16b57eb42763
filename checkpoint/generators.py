"""Random number generator objects of torch, NumPy and the standard library: found, read and set."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: What holds no generator of a loader's.
_OPAQUE = (torch.Tensor, torch.nn.Module, np.ndarray, ModuleType, type, str, bytes, int, float, complex)
#: How deep, how wide and how far a loader's own things are searched; beyond is data.
_MAX_DEPTH, _MAX_ITEMS, _MAX_OBJECTS = 8, 64, 10_000


def is_generator(value: object) -> TypeGuard[Generator]:
    """Whether ``value`` is a random number generator of one of the three libraries."""
    return isinstance(value, GENERATORS)


def generator_state(generator: Generator) -> tuple[str, Any]:
    """Which library a generator is of, and its state as tensors, arrays and plain values."""
    if isinstance(generator, torch.Generator):
        return f"torch {generator.device.type}", generator.get_state()
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
        return f"numpy {state['bit_generator']}", state
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
        return f"numpy legacy {state['bit_generator']}", state
    return "random", generator.getstate()


def set_generator_state(generator: Generator, state: Any) -> None:
    """Set what ``generator_state`` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def own_generators(loader: object) -> list[Generator]:
    """The generators that a loader draws from, each once, in an order that equal scripts share.

    They are looked for in the attributes of the loader, its samplers, its dataset (and what that wraps), its
    transforms and ``collate_fn``, and in what functions hold: closures, default and partial arguments.
    """
    return list(_Search().everything_of(loader))


class _Search:
    """Goes through what a loader refers to, as far as that can be its own: not into large or deep data."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}

    def everything_of(self, loader: object) -> Iterator[Generator]:
        parts = dict(vars(loader)) if hasattr(loader, "__dict__") else {}
        parts.pop("_iterator", None)  # of workers that stay; it belongs to the pass, not to the loader
        yield from self._each(parts.values(), _MAX_DEPTH)

    def _each(self, items: Iterable[object], depth: int) -> Iterator[Generator]:
        for item in items:
            yield from self._look(item, depth)

    def _look(self, item: object, depth: int) -> Iterator[Generator]:
        if id(item) in self._seen or len(self._seen) > _MAX_OBJECTS:
            return
        self._seen[id(item)] = item  # kept, or another object could get its id
        if is_generator(item):
            yield item
        elif depth > 0 and not isinstance(item, _OPAQUE):
            yield from self._each(_parts(item), depth - 1)


def _parts(item: Any) -> Iterable[object]:
    """What an object holds, as a script would see it."""
    if isinstance(item, (list, tuple, dict)):
        items = list(item.values()) if isinstance(item, dict) else item
        return items if len(items) <= _MAX_ITEMS else ()
    if isinstance(item, MethodType):
        return item.__self__, item.__func__
    if isinstance(item, partial):
        return item.func, item.args, item.keywords
    if isinstance(item, FunctionType):
        cells = [_content(cell) for cell in item.__closure__ or ()]
        return *cells, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()
    return list(getattr(item, "__dict__", {}).values())


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
