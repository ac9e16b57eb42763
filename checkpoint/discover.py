"""Every live storage of the process on a device: swept from the garbage collector, each found once.

The collector knows every tensor and storage that Python can reach, wherever it hides: in closures, local
variables, optimizers, threads. It does not know tensors that only C++ holds (activations saved by autograd,
DDP's buckets); those are not found, stay where they are, and are exact because nothing touches them.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import compress, repeat
from operator import attrgetter, is_not, mul, not_
from typing import TypeVar, cast

import torch

from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device

from . import heap
from .columns import Storages

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_TensorBase = torch._C.TensorBase
_cdata, _dtype, _layout = attrgetter("_cdata"), attrgetter("dtype"), attrgetter("layout")
_is_leaf, _grad = attrgetter("is_leaf"), attrgetter("grad")
_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
_T = TypeVar("_T")
#: Where memory may be besides the job's device.
_HOST = ("cpu", "meta")
_BARE = "a bare storage"
_BLOCK = 512
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


def sweep(device: Device) -> Storages:
    """All live storages of ``device`` with at least one byte.

    Raises
    ------
    SuspendRefusedError
        If a live object forbids emptying the device storage by storage (a captured CUDA graph), or if there
        is memory on a further device (another GPU), which would not be emptied.
    """
    live = _instances(torch.Tensor, torch.UntypedStorage, *device.obstacles)
    _refuse_obstacles(live, device)
    return _storages(live, device)


def check_alone(device: Device) -> None:
    """For a route that does not sweep: refuse memory on further devices, as `sweep` does."""
    _storages(_instances(torch.Tensor, torch.UntypedStorage), device)


def _storages(live: Sequence[object], device: Device) -> Storages:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        under = _Under(device)
        for tensors in _blocks(of_kind(live, torch.Tensor)):
            under.add_tensors(tensors)
        under.add_gradients()
        for storages in _blocks(of_kind(live, torch.UntypedStorage)):
            under.add_bare(storages)
        return under.found()


def _blocks(objects: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """In portions of which what is asked of one object after the other stays in the processor's cache."""
    return (objects[start : start + _BLOCK] for start in range(0, len(objects), _BLOCK))


def live_instances(*kinds: type) -> list[object]:
    """Every live object of these types, or types derived from them."""
    objects = _instances(*kinds)
    with torch._C.DisableTorchFunction():
        _each(torch.Tensor._fix_weakref, of_kind(objects, torch.Tensor))  # type: ignore[attr-defined]
        storages = of_kind(objects, torch.UntypedStorage)
        firm = _firmly(storages)
    if len(firm) == len(storages):
        return objects
    gone = set(map(id, storages)) - set(map(id, firm))
    return [item for item in objects if id(item) not in gone]


def _instances(*kinds: type) -> list[object]:
    """The same by references that do not count yet.

    The collector also shows objects that no Python code refers to any more and C++ keeps for later. A new
    reference to such a one keeps nothing alive until torch is told of it (``_fix_weakref``).
    """
    types: set[type] = set().union(*map(_family, kinds))
    return heap.instances(types)


def _firmly(storages: Sequence[torch.UntypedStorage]) -> Sequence[torch.UntypedStorage]:
    """Those that are not gone, by references that count.

    Some versions of torch destroy a storage's Python object only with the last weak reference to the
    storage, such as those that torch.multiprocessing keeps; using it would revive the storage and destroy
    it twice.
    """
    expired = list(map(torch.UntypedStorage._expired, map(_cdata, storages)))
    if any(expired):
        storages = list(compress(storages, map(not_, expired)))
    _each(torch.UntypedStorage._fix_weakref, storages)  # type: ignore[attr-defined]
    return storages


def _each(call: Callable[..., object], *items: Iterable[object]) -> None:
    """Call for each item, without going through the interpreter's loop."""
    deque(map(call, *items), maxlen=0)


def _family(kind: type) -> set[type]:
    """A type and everything derived from it."""
    return {kind}.union(*map(_family, type.__subclasses__(kind)))


def of_kind(objects: Sequence[object], kind: type[_T]) -> list[_T]:
    """Those of one type; asks the types, because proxies answer ``isinstance`` themselves."""
    types = list(map(type, objects))
    wanted = {item for item in set(types) if issubclass(item, kind)}
    return cast(list[_T], list(compress(objects, map(wanted.__contains__, types))) if wanted else [])


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that make up ``tensor``; itself, if it is a plain one."""
    names = _SPARSE_PARTS.get(tensor.layout)
    if names is not None:
        yield from (getattr(tensor, name)() for name in names)
    elif hasattr(type(tensor), "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        for part in of_kind(inner, torch.Tensor):  # a DTensor names its mesh, too
            yield from strided_parts(part)
    elif torch._C._has_storage(tensor):
        yield tensor
        if tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL:
            yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())


def with_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, of which each is there once, and their gradients, which C++ may be alone in holding."""
    gradients = _gradients(tensors)
    if not gradients:
        return tensors
    known = dict(zip(map(id, tensors), tensors, strict=True))
    known |= zip(map(id, gradients), gradients, strict=True)
    return list(known.values())


def _gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of those that may be asked: torch warns when the gradient of another one is looked at."""
    leaf = list(map(_is_leaf, tensors))
    if not all(leaf):
        retaining = [tensor for tensor in compress(tensors, map(not_, leaf)) if tensor.retains_grad]
        tensors = [*compress(tensors, leaf), *retaining]
    gradients = list(map(_grad, tensors))
    return list(compress(gradients, map(is_not, gradients, repeat(None))))


def held_by_others(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the tensors that C++ code refers to, beyond being a gradient or the base of a known view."""
    counts = list(map(_use_count, tensors))
    if max(counts, default=1) <= 1:
        return set()
    explained = Counter(map(id, _gradients(tensors)))
    views = compress(tensors, map(torch.Tensor._is_view, tensors))
    explained.update(id(view._base) for view in views)
    several = ((id(tensor), count) for tensor, count in zip(tensors, counts, strict=True) if count > 1)
    return {key for key, count in several if count > 1 + explained[key]}


class _Under:
    """The storages under tensors, and bare ones, as they are added block by block."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        #: Whether C++ code refers to any of the tensors, for whatever reason.
        self._referred = False
        #: The device's storages, and the keys of these and of those elsewhere.
        self._found = Storages()
        self._keys: set[int] = set()

    def add_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """The storages under tensors. The first tensor over a storage has the last word on its label."""
        _each(torch.Tensor._fix_weakref, tensors)  # type: ignore[attr-defined]
        self._tensors += tensors
        self._gradients += _gradients(tensors)
        self._referred = self._referred or max(map(_use_count, tensors), default=1) > 1
        storages, labels = _described(tensors)
        keys = list(map(_cdata, storages))
        if len(set(keys)) < len(keys) or not self._keys.isdisjoint(keys):
            first = {key: at for at, key in reversed(list(enumerate(keys))) if key not in self._keys}
            keys, turns = list(first), first.values()
            storages, labels = [storages[at] for at in turns], [labels[at] for at in turns]
        self._add(keys, storages, labels)

    def add_gradients(self) -> None:
        """Those of the tensors that C++ alone holds."""
        if self._gradients:
            known = set(map(id, self._tensors))
            further = {id(gradient): gradient for gradient in self._gradients}
            self.add_tensors([gradient for key, gradient in further.items() if key not in known])

    def add_bare(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Those that are under none of the tensors, when these have been added."""
        keys = list(map(_cdata, storages))
        if self._keys.issuperset(keys):
            return
        bare = _firmly([item for key, item in zip(keys, storages, strict=True) if key not in self._keys])
        new = dict(zip(map(_cdata, bare), bare, strict=True))
        self._add(list(new), list(new.values()), [_BARE] * len(new))

    def _add(self, keys: list[int], storages: list[torch.UntypedStorage], labels: list[str]) -> None:
        """Storages that are new here."""
        self._keys.update(keys)
        ours = list(map(self._device.owns, storages))
        if not all(ours):
            for storage, label in compress(zip(storages, labels, strict=True), map(not_, ours)):
                _refuse_elsewhere(storage, label, self._device)
            keys, labels = list(compress(keys, ours)), list(compress(labels, ours))
            storages = list(compress(storages, ours))
        found = self._found
        found.storages += storages
        found.keys += keys
        found.labels += labels
        found.sizes += map(torch.UntypedStorage.nbytes, storages)
        found.addresses += _addresses(storages)

    def found(self) -> Storages:
        """Those of the device that have memory (fake, functional and wrapper tensors have none)."""
        found = self._found
        if 0 in found.sizes or 0 in found.addresses:
            found = found.those(list(map(mul, found.sizes, found.addresses)))
        if self._referred:
            found.fixed = self._fixed()
        found.fix_overlapping()
        return found

    def _fixed(self) -> set[int]:
        """Keys of the storages that C++ code holds a tensor over."""
        held = held_by_others(self._tensors)
        parts = [part for tensor in self._tensors if id(tensor) in held for part in strided_parts(tensor)]
        return {part.untyped_storage()._cdata for part in parts}


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


def _described(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], list[str]]:
    """The storages under the tensors, and a label of each tensor."""
    dtypes = list(map(_dtype, tensors))
    if _are_plain(tensors, dtypes):
        # One of them may have no storage, or no one size.
        with suppress(RuntimeError, NotImplementedError):
            storages = list(map(_TensorBase.untyped_storage, tensors))
            return storages, list(map(_description, dtypes, map(_TensorBase.size, tensors)))
    parts = [part for tensor in tensors for part in strided_parts(tensor)]
    return [part.untyped_storage() for part in parts], list(map(describe_tensor, parts))


def _are_plain(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether all are what they seem: strided, over one storage, no wrapper around others, not quantized."""
    return (
        list(map(_layout, tensors)).count(torch.strided) == len(tensors)
        and _QUANTIZED.isdisjoint(dtypes)
        and not any(hasattr(kind, "__tensor_flatten__") for kind in set(map(type, tensors)))
    )


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype and shape, like ``float32 [64, 3]``."""
    return _description(tensor.dtype, None if tensor.is_nested else tensor.size())


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: torch.Size | None) -> str:
    return f"{str(dtype).removeprefix('torch.')} {'nested' if shape is None else list(shape)}"


def _refuse_elsewhere(storage: torch.UntypedStorage, label: str, device: Device) -> None:
    """Unless it is no memory of a further device."""
    if storage.device.type in _HOST or storage.nbytes() == 0 or _address(storage) == 0:
        return
    from .naming import name_of  # late: it looks for names with what is defined here

    raise SuspendRefusedError(
        f"{name_of(storage, label)} is on {storage.device}, and the job's device is {device.name}",
        "keep the state of a process on one device, and name it with --device",
    )


def _refuse_obstacles(live: Sequence[object], device: Device) -> None:
    for kind, reason in device.obstacles.items():
        if of_kind(live, kind):
            raise SuspendRefusedError(f"there is a live {kind.__name__} on {device.name}: {reason}")
