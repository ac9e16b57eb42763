"""Random number generators of torch, NumPy and the standard library: find, read, check and set them."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from gpuslice.errors import RefusedSnapshotError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
#: Exceptions of the libraries for a value that is none of their states.
NO_STATE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: Words of a Mersenne Twister, and bytes of torch's state.
_WORDS, _TORCH_BYTES = 624, 5056
#: Types that hold no generator of a loader.
_OPAQUE = (torch.Tensor, torch.nn.Module, np.ndarray, ModuleType, type, str, bytes, int, float, complex)
#: Limits of the search in a loader's attributes: depth, items of a container, objects. Beyond them is data.
_MAX_DEPTH, _MAX_ITEMS, _MAX_OBJECTS = 8, 64, 10_000


def generator_state(generator: Generator) -> tuple[str, Any]:
    """Return the library of a generator, and its state as tensors, arrays and plain values."""
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
    """Set a state that `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        _set_torch_state(generator, state.cpu())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(dict(state))  # with a short tuple, NumPy before 1.26.3 reads beyond its end
    else:
        generator.setstate(state)


def _set_torch_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set a torch generator's state, unless it is on a GPU and has that state already.

    Setting one on a GPU also makes PyTorch initialize cuDNN's dropout in recurrent networks anew, with
    numbers from that generator (``reset_rnn_state`` in ATen/cuda/CUDAGeneratorImpl.h).
    """
    if generator.device.type != "cuda" or not torch.equal(generator.get_state(), state):
        generator.set_state(state)


def check_generator_state(generator: Generator, state: Any, path: str) -> None:
    """Check that a generator can continue from a state that a file held. Changes nothing.

    torch and NumPy accept states with which they then read beyond their words (``is_valid`` in
    ATen/core/MT19937RNGEngine.h; ``state`` in numpy/random/_mt19937.pyx and _philox.pyx), and states whose
    numbers never change, so that some distributions loop for ever. So the state is set in another generator,
    and inspected there.

    Parameters
    ----------
    path
        Where the job keeps the generator.

    Raises
    ------
    RefusedSnapshotError
        If it cannot.
    """
    trial = _another(generator)
    if trial is None:
        return
    library, _ = generator_state(trial)
    try:
        set_generator_state(trial, state)
    except NO_STATE as error:
        raise RefusedSnapshotError(f"{path} was saved with no {library} state: {error}") from error
    flaw = _flaw(library, generator_state(trial)[1])
    if flaw:
        raise RefusedSnapshotError(f"{path} was saved with an impossible {library} state: {flaw}")


def _another(generator: Generator) -> Generator | None:
    """Return a new generator of the same kind; None for kinds of other libraries, which know their states."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, random.Random):
        return random.Random() if type(generator) is random.Random else None
    _, state = generator_state(generator)
    kind = getattr(np.random, state["bit_generator"], None)
    return None if kind is None else type(generator)(kind())


def _flaw(library: str, state: Any) -> str:
    """Return what is wrong with a generator's state; "" if numbers can be drawn from it."""
    beyond = stuck = False  # it draws from beyond its words; its numbers may never change
    match library.removeprefix("numpy ").removeprefix("legacy "):
        case "torch cpu" if len(state) == _TORCH_BYTES:
            left, _, following = struct.unpack_from("=iiQ", state.numpy(), 8)
            beyond = left - 1 + following > _WORDS
            stuck = _all_zero(np.frombuffer(state.numpy(), np.uint64, _WORDS, 24))
        case "random":
            stuck = _all_zero(np.array(state[1][:_WORDS]))
        case "MT19937":
            beyond = not 0 <= state["state"]["pos"] <= _WORDS
            stuck = _all_zero(state["state"]["key"])
        case "Philox":
            beyond = state["buffer_pos"] < 0
        case "PCG64" | "PCG64DXSM":
            stuck = state["state"]["inc"] % 2 == 0
    if beyond:
        return "its next numbers would lie outside of it"
    return "its numbers would not change" if stuck else ""


def _all_zero(words: np.ndarray[Any, Any]) -> bool:
    """Return True if a Mersenne Twister's words are zero. Only the highest bit of the first word counts."""
    return not words[1:].any() and words[0] < 2**31


def own_generators(loader: object) -> list[Generator]:
    """Return the generators that a loader draws from, each once, in an order that equal scripts share.

    They are looked for in the attributes of the loader, its samplers, its dataset (and wrapped datasets), its
    transforms and ``collate_fn``, and in what functions hold: closures, default and partial arguments.
    Generators held by persistent workers belong to the pass, not to the loader.
    """
    parts = {name: part for name, part in getattr(loader, "__dict__", {}).items() if name != "_iterator"}
    return list(_generators_in(parts.values(), _MAX_DEPTH, {}))


def _generators_in(items: Iterable[object], depth: int, seen: dict[int, object]) -> Iterator[Generator]:
    """Yield the generators that some objects hold. Large or deeply nested data is not searched."""
    for item in items:
        if id(item) in seen or len(seen) > _MAX_OBJECTS:
            continue
        seen[id(item)] = item  # kept, or another object could get its id
        if isinstance(item, Generator):
            yield item
        elif depth > 0 and not isinstance(item, _OPAQUE):
            yield from _generators_in(_parts(item), depth - 1, seen)


def _parts(item: Any) -> Iterable[object]:
    """Return the objects that ``item`` holds, as a script would reach them."""
    if isinstance(item, (list, tuple, dict)):
        items = list(item.values()) if isinstance(item, dict) else item
        return items if len(items) <= _MAX_ITEMS else ()
    if isinstance(item, MethodType):
        return item.__self__, item.__func__
    if isinstance(item, partial):
        return item.func, item.args, item.keywords
    if isinstance(item, FunctionType):
        cells = [content_of(cell) for cell in item.__closure__ or ()]
        return *cells, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()
    return list(getattr(item, "__dict__", {}).values())


def content_of(cell: CellType, default: object = None) -> object:
    """Return the content of a closure's cell, or ``default`` if it was not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return default
