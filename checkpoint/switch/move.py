"""Resume a state on another device: every tensor over a storage gets the new storage.

A storage cannot change its device. So each tensor object keeps its identity and gets new data, as
``Module.to`` does it. References to the old storage that cannot be redirected are refused by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import torch

from gpuslice.checkpoint.discover.bound_to_gpu import forget_capture_stream, held_on
from gpuslice.checkpoint.discover.live_graphs import has_held_gradient_node, pending_node
from gpuslice.checkpoint.discover.live_instances import live_instances
from gpuslice.checkpoint.discover.storages import held_by_others, with_gradients
from gpuslice.checkpoint.discover.tensor_parts import describe_tensor, strided_parts
from gpuslice.errors import SuspendRefusedError


def move_storages(old: Sequence[torch.UntypedStorage], new: Sequence[torch.UntypedStorage]) -> None:
    """Redirect all tensors from each old storage to the new one at the same position.

    Raises
    ------
    SuspendRefusedError
        Naming what cannot be redirected; then nothing was.
    """
    target = {before._cdata: after for before, after in zip(old, new, strict=True)}
    with torch.no_grad(), torch._C.DisableTorchFunction():
        affected = _checked(old)
        # All steps that could fail come before the first tensor changes.
        data = [_over(target[tensor.untyped_storage()._cdata], tensor) for tensor in affected]
        for tensor, its_data in zip(affected, data, strict=True):
            # This also drops the node that collects the gradient on the old device (torch's `set_data`).
            tensor.data = its_data
        if old:
            forget_capture_stream(old[0].device)


def check_movable(storages: Sequence[torch.UntypedStorage]) -> None:
    """Raise what `move_storages` would raise for these storages, with or without memory."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        _checked(storages)


def _checked(old: Sequence[torch.UntypedStorage]) -> list[torch.Tensor]:
    """Return all tensors over these storages, after a check that each can be redirected."""
    keys = {storage._cdata for storage in old}
    tensors = _with_bases(with_gradients(*live_instances(torch.Tensor)))
    affected = [tensor for tensor in tensors if not keys.isdisjoint(_storages(tensor))]
    _refuse(affected, old, held_by_others(tensors, gradient_nodes=True))
    if old and (bound := held_on(old[0].device)):
        raise _refusal(bound, f"it belongs to {old[0].device}")
    if old and (node := pending_node(tensors, old[0].device)) is not None:
        raise _refusal("an autograd graph", f"{node} has saved tensors for a backward pass that is to come")
    return affected


def _with_bases(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors and the bases of views, which C++ alone may hold."""
    known = set(map(id, tensors))
    bases = {id(view._base): view._base for view in tensors if view._is_view()}
    return tensors + [base for key, base in bases.items() if base is not None and key not in known]


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
        if tensor.is_leaf and tensor.requires_grad and has_held_gradient_node(tensor):
            raise _refusal(describe_tensor(tensor), "Python code holds the node that collects its gradient")
    if any(storage._cdata not in over for storage in old):
        raise _refusal("a bare storage", "no tensor is over it")


def _refusal(what: str, reason: str) -> SuspendRefusedError:
    return SuspendRefusedError(
        f"{what} cannot move to another device: {reason}", "resume on the device it was suspended from"
    )
