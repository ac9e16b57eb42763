"""Random number generator objects of torch, NumPy and the standard library: found, read and set."""

from __future__ import annotations

import random
from typing import Any, TypeGuard

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


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
    """The generators that a loader, its samplers and its dataset hold in attributes, each once."""
    found: dict[int, Generator] = {}
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None)
    for owner in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        found |= {id(item): item for item in _attributes(owner) if isinstance(item, GENERATORS)}
    dataset = getattr(loader, "dataset", None)
    found |= {id(item): item for item in _attributes(dataset) if isinstance(item, GENERATORS)}
    return list(found.values())


def _attributes(owner: object) -> list[Any]:
    return list(getattr(owner, "__dict__", {}).values())
