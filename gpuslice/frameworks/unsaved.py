"""What a model or a trainer holds that checkpoints of trainers lack. If it changes, no restart is exact."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

_SIZED = (list, dict, set, deque)


def plain_values(objects: dict[str, Any]) -> dict[str, object]:
    """Return the public numbers and texts among the attributes of objects, and the lengths of containers."""
    found: dict[str, object] = {}
    for name, item in objects.items():
        for key, value in vars(item).items():
            if key.startswith("_") or key == "training":
                continue
            if isinstance(value, (int, float, str)):
                found[f"{name}.{key}"] = value
            elif isinstance(value, _SIZED):
                found[f"{name}.{key}"] = len(value)
    return found


def unsaved_state(model: torch.nn.Module) -> dict[str, object]:
    """Return what no ``state_dict`` of ``model`` has, by name."""
    modules = {f"model.{name}".rstrip("."): part for name, part in model.named_modules()}
    saved = model.state_dict(keep_vars=True).keys()
    buffers = {name: (id(one), one._version) for name, one in model.named_buffers() if name not in saved}
    trained = {f"{name}.requires_grad": one.requires_grad for name, one in model.named_parameters()}
    return {**plain_values(modules), **buffers, **trained}


def changed(began: dict[str, object], now: dict[str, object]) -> str:
    """Return why a training cannot be restarted, if something has changed; else ""."""
    names = [name for name, value in now.items() if began.get(name, value) != value]
    return f"{names[0]} has changed, which no checkpoint of the trainer has" if names else ""
