"""Every live storage of the process on a device: found with the garbage collector, each once.

The collector knows every tensor and storage that Python can reach: in closures, local variables, optimizers,
threads. It does not know tensors that only C++ holds (activations saved by autograd, DDP's buckets). Those
are not found and stay where they are. They stay exact because no code touches them meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import torch
from torch.autograd.graph import get_gradient_edge

from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device
from gpuslice.kernels.host.process_memory import overlapping

from . import foreign_arrays, heap
from .live_instances import fix_weak_references, name_of, with_strong_references
from .tensor_parts import describe_tensor, strided_parts

_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
#: Devices whose memory may exist besides the job's device.
_HOST = ("cpu", "meta")
_BARE = "a bare storage"


@dataclass(slots=True)
class LiveStorage:
    """A live storage of the device.

    Attributes
    ----------
    key
        Its identity, ``storage._cdata``.
    label
        For people: dtype and shape of the first tensor found over it.
    fixed
        True if code may know its address and would not notice a change: C++ code holds a tensor
        over it (a pending autograd graph, DDP, a DLPack capsule), or other memory overlaps it.
    foreign
        True if an array of another library (CuPy, Numba, JAX) lies over it.
    exposed
        True if code that runs while the job is suspended could read its memory without torch. Only set
        if there is such code.
    """

    storage: torch.UntypedStorage
    key: int
    nbytes: int
    address: int
    label: str
    fixed: bool = False
    foreign: bool = False
    exposed: bool = False


def sweep(device: Device, *, alone: bool = True) -> list[LiveStorage]:
    """Return all live storages of ``device`` with at least one byte.

    Parameters
    ----------
    alone
        True if no code runs in this process while the job is suspended.

    Raises
    ------
    SuspendRefusedError
        If a live object forbids emptying the device storage by storage (a captured CUDA graph), or if there
        is memory on a further device (another GPU), which would not be emptied.
    """
    libraries = foreign_arrays.kinds() if device.torch_device.type == "cuda" else ()
    tensors, storages, *others = heap.look(torch.Tensor, torch.UntypedStorage, *libraries, *device.obstacles)
    _refuse_obstacles(others[len(libraries) :], device)
    found = _storages(tensors, storages, device)
    if not alone:
        _mark_exposed(found, tensors)
    _mark_foreign(found, foreign_arrays.ranges(chain.from_iterable(others[: len(libraries)])))
    return found


def sweep_any(device: Device) -> list[LiveStorage]:
    """Return all live storages, for a route that moves memory as it is. Only memory elsewhere is refused."""
    tensors, storages = heap.look(torch.Tensor, torch.UntypedStorage)
    return _storages(tensors, storages, device)


def _storages(
    tensors: list[torch.Tensor], storages: list[torch.UntypedStorage], device: Device
) -> list[LiveStorage]:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        fix_weak_references(tensors)
        live = with_gradients(tensors)
        found: dict[int, LiveStorage] = {}
        for tensor in live:
            for part in strided_parts(tensor):
                _add(found, part.untyped_storage(), part, device)
        for storage in with_strong_references(storages):
            _add(found, storage, None, device)
        for key in _held_storages(live) & found.keys():
            found[key].fixed = True
        everyone = [one for one in found.values() if one.nbytes and one.address]
        _fix_overlapping(everyone)
        return everyone


def _add(
    found: dict[int, LiveStorage], storage: torch.UntypedStorage, part: torch.Tensor | None, device: Device
) -> None:
    """Add a tensor's storage, or a bare one, to ``found``. Fake, functional and wrapper tensors have none."""
    key = storage._cdata
    if key not in found:
        label = _BARE if part is None else describe_tensor(part)
        if device.owns(storage):
            found[key] = LiveStorage(storage, key, storage.nbytes(), _address(storage), label)
        else:
            _refuse_elsewhere(storage, label, device)


def _held_storages(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the keys of the storages over which C++ code holds a tensor."""
    held = held_by_others(tensors)
    parts = [part for tensor in tensors if id(tensor) in held for part in strided_parts(tensor)]
    return {part.untyped_storage()._cdata for part in parts}


def _fix_overlapping(found: Sequence[LiveStorage]) -> None:
    """Mark storages that overlap in memory (DLPack, NumPy and back) as fixed: none may move alone."""
    if all(one.storage.resizable() for one in found):
        return  # memory that torch allocated does not overlap
    starts = overlapping([(one.address, one.nbytes) for one in found])
    shared = Counter(starts)
    for one, start in zip(found, starts, strict=True):
        one.fixed = one.fixed or shared[start] > 1


def _mark_exposed(found: Sequence[LiveStorage], tensors: Sequence[torch.Tensor]) -> None:
    """Mark storages that NumPy or unknown C++ code (DLPack, say) may read.

    A node that collects a leaf's gradient is known code: it does not read the leaf. A dead graph keeps such
    nodes. Missing ones are made here first, so that the reference count is exact.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        live = with_gradients(list(tensors))
        held = held_by_others(live)
        nodes = [
            get_gradient_edge(tensor).node
            for tensor in live
            if id(tensor) in held and tensor.is_leaf and tensor.requires_grad
        ]
        unknown = held_by_others(live, gradient_nodes=True)
        parts = [part for tensor in live if id(tensor) in unknown for part in strided_parts(tensor)]
        keys = {part.untyped_storage()._cdata for part in parts}
        del nodes
    for one in found:
        one.exposed = one.key in keys or not one.storage.resizable()


def _mark_foreign(found: Sequence[LiveStorage], arrays: Sequence[tuple[int, int]]) -> None:
    """Mark storages in which an array of another library has an address."""
    if not arrays:
        return
    starts = overlapping([*arrays, *((one.address, one.nbytes) for one in found)])
    known = set(starts[: len(arrays)])
    for one, start in zip(found, starts[len(arrays) :], strict=True):
        one.foreign = start in known


def with_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensors``, without repetitions, and their gradients, which C++ alone may hold."""
    return list({id(tensor): tensor for tensor in (*tensors, *_gradients(tensors))}.values())


def _gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of tensors that may be asked. torch warns if another one's gradient is read."""
    asked = (tensor.grad for tensor in tensors if tensor.is_leaf or tensor.retains_grad)
    return [gradient for gradient in asked if gradient is not None]


def held_by_others(tensors: Sequence[torch.Tensor], *, gradient_nodes: bool = False) -> set[int]:
    """Return the ids of tensors to which C++ code refers, other than as a gradient or a view's base.

    With ``gradient_nodes``, the nodes that collect leaves' gradients do not count: a dead graph keeps them,
    too.
    """
    counts = list(map(_use_count, tensors))
    if max(counts, default=1) <= 1:
        return set()
    explained = Counter(map(id, _gradients(tensors)))
    views = compress(tensors, map(torch.Tensor._is_view, tensors))
    explained.update(id(view._base) for view in views)
    if gradient_nodes:
        explained.update(id(tensor) for tensor in tensors if tensor.is_leaf and tensor.requires_grad)
    several = ((id(tensor), count) for tensor, count in zip(tensors, counts, strict=True) if count > 1)
    return {key for key, count in several if count > 1 + explained[key]}


def _address(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


def _refuse_elsewhere(storage: torch.UntypedStorage, label: str, device: Device) -> None:
    """Raise ``SuspendRefusedError`` if the storage has memory on another device."""
    if storage.device.type in _HOST or storage.nbytes() == 0 or _address(storage) == 0:
        return
    raise SuspendRefusedError(
        f"{name_of(storage, label)} is on {storage.device}, and the job's device is {device.name}",
        "name all devices of the process, as in --device cuda:0+1, or keep its state on one",
    )


def _refuse_obstacles(obstacles: Sequence[list[object]], device: Device) -> None:
    for found, (kind, reason) in zip(obstacles, device.obstacles.items(), strict=True):
        if found:
            raise SuspendRefusedError(f"there is a live {kind.__name__} on {device.name}: {reason}")
