"""The parts of an object: its attributes as named slots that can be read and set, and its items."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuslice.checkpoint.named import containers
from gpuslice.checkpoint.named.describe import keeps_own_state_dict
from gpuslice.checkpoint.named.generators import content_of
from gpuslice.checkpoint.named.plain_objects import attributes, delete_attribute, set_attribute

from .kinds import Kind, is_looked_into, is_scripts_own

#: Attributes that torch's classes keep for themselves, or that are saved in another way.
_MODULE = frozenset(
    {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_flat_weights"}
    | {"_is_full_backward_hook", "_compiled_call_impl", "call_super_init", "_flat_weight_refs"}
)
_OPTIMIZER = frozenset(("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "step"))
#: Attributes of Ray Train's loaders that each pass makes anew.
_OF_RAY = frozenset(("dataloader_iter", "next_batch"))
_LOADER = frozenset(("_iterator", "_DataLoader__initialized", "_DataLoader__multiprocessing_context"))
_SCALER = frozenset(("_per_optimizer_states",))
#: Attributes that a default optimizer saves itself.
_OF_OPTIMIZER = frozenset(("state", "param_groups"))


#: What a class has of its own, and what Python makes of its ``__slots__``.
_CODE = (type, types.FunctionType, property, staticmethod, classmethod, types.MemberDescriptorType)


class _Missing:
    """The placeholder for the content of a variable without a value."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def slots(item: Any, kind: Kind) -> dict[str, Any]:
    """Return the attributes of an object that may hold state, by name."""
    if kind is Kind.FUNCTION:
        return _of_function(item)
    if kind is Kind.CLASS:
        return _of_class(item)
    if kind is Kind.MODULE:
        found = attributes(item) if is_looked_into(type(item)) else {}
        own = {name: value for name, value in found.items() if name not in _MODULE and not _is_hooks(name)}
        return own | dict(item._modules)
    found = attributes(item)
    hidden = _hidden(item)
    return {name: value for name, value in found.items() if name not in hidden and not _is_hooks(name)}


def held_unseen(item: Any) -> Iterator[tuple[str, Any]]:
    """Return what an object holds besides its attributes: hooks that torch calls, and its class."""
    for name, value in attributes(item).items():
        if _is_hooks(name) and isinstance(value, dict):
            yield from ((f".{name}[{number}]", hook) for number, hook in enumerate(value.values()))
    yield ".__class__", type(item)


def _of_class(item: type) -> dict[str, Any]:
    found = {name: value for name, value in vars(item).items() if not _is_code(name, value)}
    bases = {f"__bases__[{number}]": base for number, base in enumerate(item.__bases__)}
    return found | {name: base for name, base in bases.items() if is_scripts_own(base)}


def _is_code(name: str, value: object) -> bool:
    """Return True for a class attribute that is no state: code, or Python's own, such as ``__doc__``."""
    special = name.startswith(("__", "_abc_"))
    return special or isinstance(value, _CODE)


def containers_of(item: object) -> dict[str, Any]:
    """Return an optimizer's containers of groups and of state; nothing for other objects."""
    if not isinstance(item, torch.optim.Optimizer):
        return {}
    return {"state": item.state, "param_groups": item.param_groups}


def _hidden(item: object) -> frozenset[str]:
    if isinstance(item, torch.optim.Optimizer):
        return _OPTIMIZER if keeps_own_state_dict(item) else _OPTIMIZER | _OF_OPTIMIZER
    if isinstance(item, DataLoader):
        return _LOADER | _OF_RAY if type(item).__module__.startswith("ray.") else _LOADER
    return _SCALER if isinstance(item, torch.amp.GradScaler) else frozenset()


def _is_hooks(name: str) -> bool:
    return name.startswith("_") and "hooks" in name


def _of_function(item: Any) -> dict[str, Any]:
    if isinstance(item, types.BuiltinMethodType):
        return {"__self__": item.__self__}
    if isinstance(item, types.MethodType):
        return {"__self__": item.__self__, "__func__": item.__func__}
    if isinstance(item, partial):
        return {"func": item.func, "args": item.args, "keywords": item.keywords, **vars(item)}
    found = {name: content_of(cell, MISSING) for name, cell in _cells(item)}
    if item.__defaults__:
        found["__defaults__"] = item.__defaults__
    if item.__kwdefaults__:
        found["__kwdefaults__"] = item.__kwdefaults__
    return found | {name: value for name, value in vars(item).items() if name != "__wrapped__"}


def _cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def set_slot(item: Any, name: str, value: Any) -> None:
    """Set one of the attributes that `slots` returns."""
    if isinstance(item, types.FunctionType):
        cell = dict(_cells(item)).get(name)
        if cell is not None:
            cell.cell_contents = value
            return
    if isinstance(item, torch.nn.Module) and name in item._modules:
        item._modules[name] = value
        return
    if isinstance(item, type):
        type.__setattr__(item, name, value)
        return
    set_attribute(item, name, value)


def delete_slot(item: Any, name: str) -> None:
    """Delete one of the attributes that `slots` returns."""
    if isinstance(item, types.FunctionType):
        cell = dict(_cells(item)).get(name)
        if cell is not None:
            del cell.cell_contents
            return
    if isinstance(item, type):
        type.__delattr__(item, name)
        return
    delete_attribute(item, name)


def items(container: Any) -> list[Any]:
    """Return a container's items, in order; for a dictionary first the keys, then the values."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def labelled(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield each item of a container with its label, such as ``[0]``, which follows the container's name."""
    if isinstance(container, dict):
        for number, (key, value) in enumerate(container.items()):
            name = repr(key) if isinstance(key, (str, int, float, tuple)) else f"#{number}"
            yield f"[{name}]", value
            if not isinstance(key, (str, int, float)):
                yield f".keys()[{number}]", key
    else:
        for number, value in enumerate(container):
            yield f"[{number}]", value


def refill(container: Any, kept: Sequence[Any]) -> None:
    """Replace a container's content by what `items` returned."""
    half = len(kept) // 2
    pairs = zip(kept[:half], kept[half:], strict=True)
    containers.fill(container, dict(pairs) if isinstance(container, dict) else kept, {})
