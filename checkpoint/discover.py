"""Every live storage of the process on a device: swept from the garbage collector, each found once.

The collector knows every tensor and storage that Python can reach, wherever it hides: in closures, local
variables, optimizers, threads. It does not know tensors that only C++ holds (activations saved by autograd,
DDP's buckets); those are not found, stay where they are, and are exact because nothing touches them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NoReturn, TypeVar, cast

import torch

from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device

from . import heap

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_T = TypeVar("_T")
#: Where memory may be besides the job's device.
_HOST = ("cpu", "meta")
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


@dataclass(slots=True)
class Found:
    """One live storage.

    Attributes
    ----------
    label
        For people: dtype and shape of the first tensor found over it.
    fixed
        Its address may be known to somebody who would not notice a change: C++ code holds a tensor over
        it (a pending autograd graph, DDP, a DLPack capsule), or other memory overlaps it.
    """

    storage: torch.UntypedStorage
    nbytes: int
    address: int
    label: str
    fixed: bool = False


def sweep(device: Device) -> list[Found]:
    """All live storages of ``device`` with at least one byte, in the order of their addresses.

    Raises
    ------
    SuspendRefusedError
        If a live object forbids emptying the device storage by storage (a captured CUDA graph), or if there
        is memory on a further device (another GPU), which would not be emptied.
    """
    live = live_instances(torch.Tensor, torch.UntypedStorage, *device.obstacles)
    _refuse_obstacles(live, device)
    found = _storages(live, device)
    ordered = sorted(found.values(), key=attrgetter("address"))
    _fix_overlapping(ordered)
    return ordered


def check_alone(device: Device) -> None:
    """For a route that does not sweep: refuse memory on further devices, as `sweep` does."""
    _storages(live_instances(torch.Tensor, torch.UntypedStorage), device)


def _storages(live: Sequence[object], device: Device) -> dict[int, Found]:
    found: dict[int, Found] = {}
    with torch.no_grad(), torch._C.DisableTorchFunction():
        tensors = with_gradients(of_kind(live, torch.Tensor))
        held = held_by_others(tensors)
        for tensor in tensors:
            for part in strided_parts(tensor):
                entry = _enter(found, device, part.untyped_storage(), part)
                if entry is not None and id(tensor) in held:
                    entry.fixed = True
        for storage in of_kind(live, torch.UntypedStorage):
            _enter(found, device, storage, None)
    return found


def live_instances(*kinds: type) -> list[object]:
    """Every live object of these types, or types derived from them."""
    types: set[type] = set().union(*map(_family, kinds))
    found = [item for item in heap.instances(types) if not _expired(item)]
    _hold(found)
    return found


def _expired(item: object) -> bool:
    """Whether it is what a storage left behind that is gone.

    Some versions of torch destroy a storage's Python object only with the last weak reference to the storage,
    such as those that torch.multiprocessing keeps. Using it would revive the storage and destroy it twice.
    """
    if not issubclass(type(item), torch.UntypedStorage):
        return False
    with torch._C.DisableTorchFunction():
        storage = cast(torch.UntypedStorage, item)
        return bool(torch.UntypedStorage._expired(storage._cdata))


def _hold(objects: Iterable[object]) -> None:
    """Make each reference to a tensor or storage one that counts.

    The collector also shows objects that no Python code refers to any more and C++ keeps for later. A new
    reference to such a one keeps nothing alive until torch is told of it (``_fix_weakref``).
    """
    with torch._C.DisableTorchFunction():
        for tensor in of_kind(objects, torch.Tensor):
            torch.Tensor._fix_weakref(tensor)  # type: ignore[attr-defined]
        for storage in of_kind(objects, torch.UntypedStorage):
            torch.UntypedStorage._fix_weakref(storage)  # type: ignore[attr-defined]


def _family(kind: type) -> set[type]:
    """A type and everything derived from it."""
    return {kind}.union(*map(_family, type.__subclasses__(kind)))


def of_kind(objects: Iterable[object], kind: type[_T]) -> list[_T]:
    """Those of one type; asks the types, because proxies answer ``isinstance`` themselves."""
    return [cast(_T, item) for item in objects if issubclass(type(item), kind)]


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that make up ``tensor``; itself, if it is a plain one."""
    names = _SPARSE_PARTS.get(tensor.layout)
    if names is not None:
        yield from (getattr(tensor, name)() for name in names)
    elif hasattr(type(tensor), "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        for part in of_kind(inner, torch.Tensor):  # a DTensor names its mesh, too
            yield from strided_parts(part)
    elif torch._C._has_storage(tensor):
        yield tensor
        if tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL:
            yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())


def with_gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors`` and their gradients, which C++ may be alone in holding; each object once."""
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf or tensor.retains_grad]
    known = {id(tensor): tensor for tensor in tensors}
    known |= {id(gradient): gradient for gradient in gradients if gradient is not None}
    return list(known.values())


def held_by_others(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the tensors that C++ code refers to, beyond being a gradient or the base of a known view."""
    explained = Counter(id(tensor.grad) for tensor in tensors if tensor.is_leaf or tensor.retains_grad)
    explained.update(id(tensor._base) for tensor in tensors if tensor._is_view())
    return {id(t) for t in tensors if t._use_count() > 1 + explained[id(t)]}  # type: ignore[attr-defined]


def _enter(
    found: dict[int, Found], device: Device, storage: torch.UntypedStorage, tensor: torch.Tensor | None
) -> Found | None:
    """Note a storage of the device, unless it has no memory (fake, functional and wrapper tensors)."""
    entry = found.get(storage._cdata)
    ours = device.owns(storage)
    if entry is not None or storage.nbytes() == 0 or (not ours and storage.device.type in _HOST):
        return entry
    try:
        address = storage.data_ptr()
    except RuntimeError:
        return None
    if address == 0:
        return None
    label = "a bare storage" if tensor is None else describe_tensor(tensor)
    entry = Found(storage, storage.nbytes(), address, label)
    if not ours:
        _refuse_elsewhere(entry, device)
    found[storage._cdata] = entry
    return entry


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype and shape, like ``float32 [64, 3]``."""
    return _description(tensor.dtype, () if tensor.is_nested else tuple(tensor.shape), tensor.is_nested)


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: tuple[int, ...], nested: bool) -> str:
    return f"{str(dtype).removeprefix('torch.')} {'nested' if nested else list(shape)}"


def _fix_overlapping(ordered: Sequence[Found]) -> None:
    """Mark storages over the same memory (DLPack, NumPy and back): none of them may move alone."""
    reach: Found | None = None
    for entry in ordered:
        if reach is not None and entry.address < reach.address + reach.nbytes:
            entry.fixed = reach.fixed = True
        if reach is None or entry.address + entry.nbytes > reach.address + reach.nbytes:
            reach = entry


def _refuse_elsewhere(entry: Found, device: Device) -> NoReturn:
    from .naming import name_of  # late: it looks for names with what is defined here

    raise SuspendRefusedError(
        f"{name_of(entry)} is on {entry.storage.device}, and the job's device is {device.name}",
        "keep the state of a process on one device, and name it with --device",
    )


def _refuse_obstacles(live: Sequence[object], device: Device) -> None:
    for kind, reason in device.obstacles.items():
        if of_kind(live, kind):
            raise SuspendRefusedError(f"there is a live {kind.__name__} on {device.name}: {reason}")
