"""What a person would call a tensor: worked out only when a message has to name one."""

from __future__ import annotations

import torch

from . import heap
from .live_instances import live_instances


def name_of(storage: torch.UntypedStorage, label: str) -> str:
    """The best name for a storage: a module's parameter, else a variable or key, with its label."""
    tensors, modules = live_instances(torch.Tensor, torch.nn.Module)
    with torch._C.DisableTorchFunction():
        over = [tensor for tensor in tensors if _lies_in(tensor, storage)]
        name = _name_in_modules(modules, storage) or _name_of_variable(over)
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


def _name_of_variable(tensors: list[torch.Tensor]) -> str | None:
    for tensor in tensors:
        for holder in heap.referrers(tensor):
            if isinstance(holder, dict):
                names = [key for key, value in holder.items() if value is tensor and isinstance(key, str)]
                if names:
                    return names[0]
    return None


def _lies_in(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata == storage._cdata
