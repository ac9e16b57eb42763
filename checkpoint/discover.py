"""Every live storage of the process on a device: swept from the garbage collector, each found once.

The collector knows every tensor and storage that Python can reach, wherever it hides: in closures, local
variables, optimizers, threads. It does not know tensors that only C++ holds (activations saved by autograd,
DDP's buckets); those are not found, stay where they are, and are exact because nothing touches them.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import compress, repeat
from operator import attrgetter, not_
from typing import Any, NoReturn, TypeVar, cast

import msgspec
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
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_TensorBase = torch._C.TensorBase
_cdata, _dtype = attrgetter("_cdata"), attrgetter("dtype")
_T = TypeVar("_T")
#: Where memory may be besides the job's device.
_HOST = ("cpu", "meta")
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


class Found(msgspec.Struct, gc=False):
    """One live storage.

    Attributes
    ----------
    key
        Its identity: ``storage._cdata``.
    label
        For people: dtype and shape of the first tensor found over it.
    fixed
        Its address may be known to somebody who would not notice a change: C++ code holds a tensor over
        it (a pending autograd graph, DDP, a DLPack capsule), or other memory overlaps it.
    """

    storage: torch.UntypedStorage
    key: int
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
    found.sort(key=attrgetter("address"))
    _fix_overlapping(found)
    return found


def check_alone(device: Device) -> None:
    """For a route that does not sweep: refuse memory on further devices, as `sweep` does."""
    _storages(live_instances(torch.Tensor, torch.UntypedStorage), device)


def _storages(live: Sequence[object], device: Device) -> list[Found]:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        tensors = with_gradients(of_kind(live, torch.Tensor))
        columns = _storages_of(tensors, held_by_others(tensors))
        columns.add_bare(of_kind(live, torch.UntypedStorage))
        return columns.on(device)


def live_instances(*kinds: type) -> list[object]:
    """Every live object of these types, or types derived from them."""
    types: set[type] = set().union(*map(_family, kinds))
    with torch._C.DisableTorchFunction():
        return _held_firmly(heap.instances(types))


def _held_firmly(objects: list[object]) -> list[object]:
    """These objects by references that count, without what a storage left behind that is gone.

    The collector also shows objects that no Python code refers to any more and C++ keeps for later. A new
    reference to such a one keeps nothing alive until torch is told of it (``_fix_weakref``). And some
    versions of torch destroy a storage's Python object only with the last weak reference to the storage,
    such as those that torch.multiprocessing keeps; using it would revive the storage and destroy it twice.
    """
    storages = of_kind(objects, torch.UntypedStorage)
    expired = list(map(torch.UntypedStorage._expired, map(_cdata, storages)))
    if any(expired):
        gone = set(map(id, compress(storages, expired)))
        objects = [item for item in objects if id(item) not in gone]
        storages = of_kind(objects, torch.UntypedStorage)
    _each(torch.Tensor._fix_weakref, of_kind(objects, torch.Tensor))  # type: ignore[attr-defined]
    _each(torch.UntypedStorage._fix_weakref, storages)  # type: ignore[attr-defined]
    return objects


def _each(call: Callable[[Any], object], items: Iterable[object]) -> None:
    """Call for each item, without going through the interpreter's loop."""
    deque(map(call, items), maxlen=0)


def _family(kind: type) -> set[type]:
    """A type and everything derived from it."""
    return {kind}.union(*map(_family, type.__subclasses__(kind)))


def of_kind(objects: Iterable[object], kind: type[_T]) -> list[_T]:
    """Those of one type; asks the types, because proxies answer ``isinstance`` themselves."""
    objects = list(objects)
    types = list(map(type, objects))
    wanted = {item for item in set(types) if issubclass(item, kind)}
    return cast(list[_T], list(compress(objects, map(wanted.__contains__, types))))


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
    known = dict(zip(map(id, tensors), tensors, strict=True))
    known |= {id(gradient): gradient for gradient in _gradients(tensors)}
    return list(known.values())


def _gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of those that may be asked: torch warns when the gradient of another one is looked at."""
    leaf = list(map(attrgetter("is_leaf"), tensors))
    inner = compress(tensors, map(not_, leaf))
    retaining = [tensor for tensor in inner if tensor.retains_grad]
    gradients = map(attrgetter("grad"), [*compress(tensors, leaf), *retaining])
    return [gradient for gradient in gradients if gradient is not None]


def held_by_others(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the tensors that C++ code refers to, beyond being a gradient or the base of a known view."""
    counts = map(torch.Tensor._use_count, tensors)  # type: ignore[attr-defined]
    several = [(id(tensor), count) for tensor, count in zip(tensors, counts, strict=True) if count > 1]
    if not several:
        return set()
    explained = Counter(map(id, _gradients(tensors)))
    views = compress(tensors, map(torch.Tensor._is_view, tensors))
    explained.update(id(view._base) for view in views)
    return {key for key, count in several if count > 1 + explained[key]}


@dataclass(slots=True)
class _Columns:
    """Storages, each once, in columns; what is asked of all of them is asked in one go.

    Attributes
    ----------
    storages
        By identity of the memory's owner (``_cdata``).
    labels
        For those that a tensor is over, likewise.
    fixed
        Identities of those that C++ code holds a tensor over.
    """

    storages: dict[int, torch.UntypedStorage]
    labels: dict[int, str]
    fixed: set[int]

    def add_bare(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Storages that no tensor may be over."""
        self.storages = dict(zip(map(_cdata, storages), storages, strict=True)) | self.storages

    def on(self, device: Device) -> list[Found]:
        """Those of the device that have memory (fake, functional and wrapper tensors have none)."""
        storages = list(self.storages.values())
        ours = list(map(device.owns, storages))
        for storage in compress(storages, map(not_, ours)):
            if storage.device.type not in _HOST:
                for entry in self._found([storage]):
                    _refuse_elsewhere(entry, device)
        return self._found(list(compress(storages, ours)))

    def _found(self, storages: list[torch.UntypedStorage]) -> list[Found]:
        keys = list(map(_cdata, storages))
        sizes = list(map(torch.UntypedStorage.nbytes, storages))
        addresses = _addresses(storages)
        labels = map(self.labels.get, keys, repeat("a bare storage"))
        found = map(Found, storages, keys, sizes, addresses, labels, map(self.fixed.__contains__, keys))
        return list(compress(found, map(operator.and_, map(bool, sizes), map(bool, addresses))))


def _addresses(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """Where each storage's memory is; 0 for those without memory."""
    try:
        return list(map(torch.UntypedStorage.data_ptr, storages))
    except RuntimeError:  # one of them is fake
        return list(map(_address, storages))


def _address(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


def _storages_of(tensors: Sequence[torch.Tensor], held: Set[int]) -> _Columns:
    """The storages under the tensors, with a label from the first tensor over each."""
    wrappers = {kind for kind in set(map(type, tensors)) if hasattr(kind, "__tensor_flatten__")}
    layouts = map(attrgetter("layout"), tensors)
    dtypes = map(attrgetter("dtype"), tensors)
    plain = [
        layout is torch.strided and kind not in wrappers and dtype not in _QUANTIZED
        for layout, kind, dtype in zip(layouts, map(type, tensors), dtypes, strict=True)
    ]
    parts: list[torch.Tensor] = list(compress(tensors, plain))
    owners = list(map(id, parts))
    try:
        storages = list(map(_TensorBase.untyped_storage, parts))
        labels = list(map(_description, map(_dtype, parts), map(_TensorBase.size, parts)))
    except (RuntimeError, NotImplementedError):  # one of them has no storage, or no one size
        parts, owners, storages, labels = [], [], [], []
        plain = [False] * len(tensors)
    for tensor in compress(tensors, map(not_, plain)):
        for part in strided_parts(tensor):
            owners.append(id(tensor))
            storages.append(part.untyped_storage())
            labels.append(describe_tensor(part))
    keys = list(map(_cdata, storages))
    # From behind, so that the first tensor over a storage has the last word.
    named = dict(zip(reversed(keys), reversed(labels), strict=True))
    fixed = {key for key, owner in zip(keys, owners, strict=True) if owner in held} if held else set()
    return _Columns(dict(zip(keys, storages, strict=True)), named, fixed)


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype and shape, like ``float32 [64, 3]``."""
    return _description(tensor.dtype, None if tensor.is_nested else tensor.size())


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: torch.Size | None) -> str:
    return f"{str(dtype).removeprefix('torch.')} {'nested' if shape is None else list(shape)}"


def _fix_overlapping(ordered: Sequence[Found]) -> None:
    """Mark storages over the same memory (DLPack, NumPy and back): none of them may move alone."""
    ends = [entry.address + entry.nbytes for entry in ordered]
    if all(map(operator.le, ends, map(attrgetter("address"), ordered[1:]))):
        return
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
