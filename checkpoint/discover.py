"""Every live storage of the process on a device: swept from the garbage collector, each found once.

The collector knows every tensor and storage that Python can reach, wherever it hides: in closures, local
variables, optimizers, threads. It does not know tensors that only C++ holds (activations saved by autograd,
DDP's buckets); those are not found, stay where they are, and are exact because nothing touches them.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not, mul, not_
from typing import NoReturn, TypeVar, cast

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
        for block in _blocks(live):
            under.add(*_held_firmly(block))
        return under.found()


def _blocks(objects: Sequence[object]) -> Iterator[Sequence[object]]:
    """In portions of which what is asked of one object after the other stays in the processor's cache."""
    return (objects[start : start + _BLOCK] for start in range(0, len(objects), _BLOCK))


def live_instances(*kinds: type) -> list[object]:
    """Every live object of these types, or types derived from them."""
    objects = _instances(*kinds)
    with torch._C.DisableTorchFunction():
        tensors, storages = _held_firmly(objects)
    if len(storages) == len(of_kind(objects, torch.UntypedStorage)):
        return objects
    others = [item for item in objects if not issubclass(type(item), (torch.Tensor, torch.UntypedStorage))]
    return [*others, *tensors, *storages]


def _instances(*kinds: type) -> list[object]:
    """The same, but not yet `_held_firmly`."""
    types: set[type] = set().union(*map(_family, kinds))
    return heap.instances(types)


def _held_firmly(objects: Sequence[object]) -> tuple[list[torch.Tensor], list[torch.UntypedStorage]]:
    """Tensors and storages among these, by references that count, without storages that are gone.

    The collector also shows objects that no Python code refers to any more and C++ keeps for later. A new
    reference to such a one keeps nothing alive until torch is told of it (``_fix_weakref``). And some
    versions of torch destroy a storage's Python object only with the last weak reference to the storage,
    such as those that torch.multiprocessing keeps; using it would revive the storage and destroy it twice.
    """
    tensors, storages = of_kind(objects, torch.Tensor), of_kind(objects, torch.UntypedStorage)
    expired = list(map(torch.UntypedStorage._expired, map(_cdata, storages)))
    if any(expired):
        storages = list(compress(storages, map(not_, expired)))
    _each(torch.Tensor._fix_weakref, tensors)  # type: ignore[attr-defined]
    _each(torch.UntypedStorage._fix_weakref, storages)  # type: ignore[attr-defined]
    return tensors, storages


def _each(call: Callable[..., object], *items: Iterable[object]) -> None:
    """Call for each item, without going through the interpreter's loop."""
    deque(map(call, *items), maxlen=0)


def _family(kind: type) -> set[type]:
    """A type and everything derived from it."""
    return {kind}.union(*map(_family, type.__subclasses__(kind)))


def of_kind(objects: Iterable[object], kind: type[_T]) -> list[_T]:
    """Those of one type; asks the types, because proxies answer ``isinstance`` themselves."""
    objects = list(objects)
    types = list(map(type, objects))
    wanted = {item for item in set(types) if issubclass(item, kind)}
    if not wanted:
        return []
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
        #: The device's storages, those of further devices, the keys of all, labels of those under tensors.
        self._found = Storages()
        self._elsewhere: list[torch.UntypedStorage] = []
        self._keys: set[int] = set()
        self._labels: dict[int, str] = {}

    def add(self, tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        """Tensors, and storages that may be under some of them."""
        self._gradients += _gradients(tensors)
        self._add_tensors(tensors)
        self._look_at(storages)

    def found(self) -> Storages:
        """Those of the device that have memory (fake, functional and wrapper tensors have none)."""
        self._add_gradients()
        for storage in self._elsewhere:
            _refuse_elsewhere(storage, self._labels.get(storage._cdata, _BARE), self._device)
        found = self._found
        found.labels = list(map(self._labels.get, found.keys, repeat(_BARE)))
        if 0 in found.sizes or 0 in found.addresses:
            found = found.those(list(map(mul, found.sizes, found.addresses)))
        if self._referred:
            found.fixed = self._fixed()
        found.fix_overlapping()
        return found

    def _add_gradients(self) -> None:
        """Those that C++ alone holds."""
        if self._gradients:
            known = set(map(id, self._tensors))
            further = {id(gradient): gradient for gradient in self._gradients}
            self._add_tensors([gradient for key, gradient in further.items() if key not in known])

    def _add_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors += tensors
        self._referred = self._referred or max(map(_use_count, tensors), default=1) > 1
        storages, labels = _described(tensors)
        # The first tensor over a storage has the last word.
        _each(self._labels.setdefault, map(_cdata, storages), labels)
        self._look_at(storages)

    def _look_at(self, storages: Sequence[torch.UntypedStorage]) -> None:
        new = dict(zip(map(_cdata, storages), storages, strict=True))
        if not self._keys.isdisjoint(new):
            new = {key: new[key] for key in new.keys() - self._keys}
            if not new:
                return
        self._keys.update(new)
        ours = list(map(self._device.owns, new.values()))
        if not all(ours):
            self._elsewhere += (
                storage for storage in compress(new.values(), map(not_, ours)) if _is_elsewhere(storage)
            )
            new = dict(compress(new.items(), ours))
        storages = list(new.values())
        found = self._found
        found.storages += storages
        found.keys += new
        found.sizes += map(torch.UntypedStorage.nbytes, storages)
        found.addresses += _addresses(storages)

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
    plain = _are_plain(tensors)
    simple = list(compress(tensors, plain))
    try:
        storages = list(map(_TensorBase.untyped_storage, simple))
        labels = list(map(_description, map(_dtype, simple), map(_TensorBase.size, simple)))
    except (RuntimeError, NotImplementedError):  # one of them has no storage, or no one size
        storages, labels = [], []
        plain = [False] * len(tensors)
    for tensor in compress(tensors, map(not_, plain)):
        for part in strided_parts(tensor):
            storages.append(part.untyped_storage())
            labels.append(describe_tensor(part))
    return storages, labels


def _are_plain(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each is what it seems: strided, over one storage, no wrapper around others, not quantized."""
    layouts, dtypes = list(map(_layout, tensors)), list(map(_dtype, tensors))
    wrappers = {kind for kind in set(map(type, tensors)) if hasattr(kind, "__tensor_flatten__")}
    if not wrappers and set(layouts) <= {torch.strided} and _QUANTIZED.isdisjoint(dtypes):
        return [True] * len(tensors)
    return [
        layout is torch.strided and kind not in wrappers and dtype not in _QUANTIZED
        for layout, kind, dtype in zip(layouts, map(type, tensors), dtypes, strict=True)
    ]


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype and shape, like ``float32 [64, 3]``."""
    return _description(tensor.dtype, None if tensor.is_nested else tensor.size())


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: torch.Size | None) -> str:
    return f"{str(dtype).removeprefix('torch.')} {'nested' if shape is None else list(shape)}"


def _is_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether it is memory of a further device."""
    return storage.device.type not in _HOST and storage.nbytes() > 0 and _address(storage) != 0


def _refuse_elsewhere(storage: torch.UntypedStorage, label: str, device: Device) -> NoReturn:
    from .naming import name_of  # late: it looks for names with what is defined here

    raise SuspendRefusedError(
        f"{name_of(storage, label)} is on {storage.device}, and the job's device is {device.name}",
        "keep the state of a process on one device, and name it with --device",
    )


def _refuse_obstacles(live: Sequence[object], device: Device) -> None:
    for kind, reason in device.obstacles.items():
        if of_kind(live, kind):
            raise SuspendRefusedError(f"there is a live {kind.__name__} on {device.name}: {reason}")
