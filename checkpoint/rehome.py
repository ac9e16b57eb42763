"""A state that comes back on another device: every tensor over a storage gets the new one.

A storage cannot change its device, so each tensor object keeps its identity and gets new data, as
``Module.to`` does it. What refers to the old storage in a way that cannot be redirected is refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import torch

from gpuslice.errors import SuspendRefusedError

from .discover import held_by_others, live_instances, with_gradients
from .parts import describe_tensor, strided_parts


def rehome(old: Sequence[torch.UntypedStorage], new: Sequence[torch.UntypedStorage]) -> None:
    """Redirect all tensors from each old storage to the new one at the same position.

    Raises
    ------
    SuspendRefusedError
        Naming what cannot be redirected; then nothing was.
    """
    target = {before._cdata: after for before, after in zip(old, new, strict=True)}
    with torch.no_grad(), torch._C.DisableTorchFunction():
        tensors = with_gradients(*live_instances(torch.Tensor))
        affected = [tensor for tensor in tensors if _storages(tensor) & target.keys()]
        _refuse(affected, old, held_by_others(tensors))
        # Everything that could fail comes before the first tensor changes.
        data = [_over(target[tensor.untyped_storage()._cdata], tensor) for tensor in affected]
        for tensor, its_data in zip(affected, data, strict=True):
            tensor.data = its_data


def _storages(tensor: torch.Tensor) -> set[int]:
    return {part.untyped_storage()._cdata for part in strided_parts(tensor)}


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def _refuse(affected: Sequence[torch.Tensor], old: Sequence[torch.UntypedStorage], held: Set[int]) -> None:
    over = Counter(tensor.untyped_storage()._cdata for tensor in affected if torch._C._has_storage(tensor))
    for tensor in affected:
        if not torch._C._has_storage(tensor) or tensor.is_quantized or len(_storages(tensor)) > 1:
            raise _refusal(describe_tensor(tensor), f"its layout ({type(tensor).__name__}) hides the memory")
        storage = tensor.untyped_storage()
        # Each tensor over a storage counts once, and so does its Python object.
        others = torch._C._storage_Use_Count(storage._cdata) - over[storage._cdata] - 1
        if id(tensor) in held or others > 0:
            raise _refusal(
                describe_tensor(tensor), "C++ code refers to it (a pending autograd graph, DDP, DLPack)"
            )
    if any(storage._cdata not in over for storage in old):
        raise _refusal("a bare storage", "no tensor is over it")


def _refusal(what: str, reason: str) -> SuspendRefusedError:
    return SuspendRefusedError(
        f"{what} cannot move to another device: {reason}", "resume on the device it was suspended from"
    )
