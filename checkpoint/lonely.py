"""Which of an optimizer's state can be reached through ``optimizer.state`` alone, by counts of references."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import heap


class _Sample:
    """An object to which one dict refers."""

    def __init__(self) -> None:
        self.itself = 0


def _count(holder: Any, key: Any) -> int:
    return sys.getrefcount(holder[key])


#: Whether they say who has an object.
COUNTS_ARE_EXACT = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()


def _counts_of_a_tensor() -> tuple[int, int]:
    """What ``_count`` gives for a tensor that one dict has, and for the Python object of its storage.

    Some versions of torch count themselves, too.
    """
    tensor = {"": torch.empty(1, device="cpu")}
    storage = {"": tensor[""].untyped_storage()}
    return _count(tensor, ""), _count(storage, "")


#: What ``_count`` gives for any other object to which only ``holder`` refers.
_ONCE = _count({"": _Sample()}, "")
_TENSOR_ONCE, _STORAGE_ONCE = _counts_of_a_tensor()
_SAMPLE = _Sample()
#: What ``sys.getrefcount`` gives for the ``__dict__`` of an object that nobody else has asked for it.
_OWN_DICT = sys.getrefcount(object.__getattribute__(_SAMPLE, "__dict__"))


def lonely(
    own: dict[Any, Any],
    storages: Sequence[torch.UntypedStorage],
    candidates: Mapping[int, int],
    known: Mapping[int, int],
) -> list[int]:
    """``_cdata`` of the candidates that can be reached only through an optimizer's ``state_of``.

    From the outside in: who has no reference to the outer object by then cannot get one to the inner.

    Parameters
    ----------
    storages
        Those that are away.
    candidates
        ``_cdata`` -> the position among ``storages``.
    known
        Weak references that are the sweep's own, by ``heap.identity``, and how many times each is.
    """
    found = []
    everyone = list(own.values())
    for index in range(len(everyone)):
        # Besides the state, our list refers to it.
        if type(everyone[index]) is not dict or _count(everyone, index) != _ONCE + 1:
            continue
        slots = everyone[index]
        for name in list(slots):
            if type(slots[name]) is not torch.Tensor or not torch._C._has_storage(slots[name]):
                continue
            if slots[name].untyped_storage()._cdata not in candidates or not _alone(slots, name, known):
                continue
            address = _its_only_storage(slots[name])
            if address is not None and _only_ours(storages, candidates[address], known):
                found.append(address)
    return found


def state_of(optimizer: torch.optim.Optimizer, bar: Callable[..., Any]) -> dict[Any, Any] | None:
    """The optimizer's state, if ``bar`` as its ``__getattribute__`` is the only way to it."""
    kind = type(optimizer)
    if kind.__getattribute__ is not bar or any("state" in vars(base) for base in kind.__mro__):
        return None
    if sys.getrefcount(object.__getattribute__(optimizer, "__dict__")) != _OWN_DICT:
        return None
    attributes = object.__getattribute__(optimizer, "__dict__")
    if "state" not in attributes or _count(attributes, "state") != _ONCE:
        return None
    state = attributes["state"]
    return state if type(state) in (dict, defaultdict) else None


def _alone(holder: Mapping[Any, Any], key: Any, known: Mapping[int, int]) -> bool:
    """Whether only ``holder`` refers to its tensor, and nobody weakly but the sweep."""
    return _not_watched(holder[key], known) and _count(holder, key) == _TENSOR_ONCE


def _not_watched(item: object, known: Mapping[int, int]) -> bool:
    references = weakref.getweakrefs(item)
    if not references:
        return True
    # References without a callback are shared: the sweep's own may be somebody else's, too.
    ours = known.get(heap.identity(references[0]), 0)
    return len(references) == 1 and ours > 0 and sys.getrefcount(references[0]) == _ONCE + ours


def _its_only_storage(tensor: torch.Tensor) -> int | None:
    """``_cdata`` of the memory of a tensor that nothing of torch's refers to either, or to that memory."""
    if tensor.layout is not torch.strided or tensor.requires_grad or tensor.grad_fn is not None:
        return None
    if tensor._is_view() or tensor.grad is not None:
        return None
    address: int = tensor.untyped_storage()._cdata
    # The tensor and the Python object of the storage count once each.
    uses = torch._C._storage_Use_Count(address)
    return address if uses == 2 and tensor._use_count() == 1 else None  # type: ignore[attr-defined]


def _only_ours(storages: Sequence[torch.UntypedStorage], position: int, known: Mapping[int, int]) -> bool:
    """Whether the storage's Python object is in nobody's hands but ours."""
    return _not_watched(storages[position], known) and _count(storages, position) == _STORAGE_ONCE
