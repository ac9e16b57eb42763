"""All live objects of some types, by counted references; and readable names of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import heap


def live_instances(*kinds: type) -> list[list[Any]]:
    """Return for each of these types every live object of the type or its subclasses.

    The collector also shows objects that no Python code refers to any more and that C++ keeps for later. A
    new reference to such an object keeps nothing alive until torch is told (``_fix_weakref``).
    """
    found = heap.look(*kinds)
    with torch._C.DisableTorchFunction():
        for number, kind in enumerate(kinds):
            if issubclass(kind, torch.Tensor):
                fix_weak_references(found[number])
            elif issubclass(kind, torch.UntypedStorage):
                found[number] = with_strong_references(found[number])
    return found


def with_strong_references(storages: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Return the storages that are still alive, each kept alive by the returned reference.

    Some versions of torch destroy a storage's Python object only with the last weak reference to the storage
    (torch.multiprocessing keeps such references). Using it would revive the storage and destroy it twice.
    """
    there = [one for one in storages if not torch.UntypedStorage._expired(one._cdata)]
    fix_weak_references(there)
    return there


def fix_weak_references(found: Sequence[Any]) -> None:
    """Tell torch of references to tensors or storages, so that they keep the objects alive."""
    for one in found:
        one._fix_weakref()


def name_of(storage: torch.UntypedStorage, label: str) -> str:
    """Return the best name of a storage: a module's parameter, else a variable or key, with its label."""
    heap.thaw()  # the outermost module may have been frozen at the start
    tensors, modules = live_instances(torch.Tensor, torch.nn.Module)
    with torch._C.DisableTorchFunction():
        over = [tensor for tensor in tensors if _lies_in(tensor, storage)]
        name = _name_in_modules(modules, storage) or name_of_variable(over)
    return f"{name} ({label})" if name else label


def _name_in_modules(modules: list[torch.nn.Module], storage: torch.UntypedStorage) -> str | None:
    names = [
        f"{type(module).__name__}.{path}"
        for module in modules
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]
        if _lies_in(tensor, storage)
    ]
    # The longest qualified name is the one from the outermost module.
    return max(names, key=len, default=None)


def name_of_variable(tensors: Sequence[object]) -> str | None:
    """Return the variable, attribute or key that holds one of these objects, or None."""
    for tensor in tensors:
        for holder in heap.referrers(tensor):
            if isinstance(holder, dict):
                names = [key for key, value in holder.items() if value is tensor and isinstance(key, str)]
                if names:
                    return names[0]
    return None


def _lies_in(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata == storage._cdata
