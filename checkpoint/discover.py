"""Every live storage of the process on a device: swept from the garbage collector, each found once.

The collector knows every tensor and storage that Python can reach, wherever it hides: in closures, local
variables, optimizers, threads. It does not know tensors that only C++ holds (activations saved by autograd,
DDP's buckets); those are not found, stay where they are, and are exact because nothing touches them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not, mul, not_
from typing import Any, TypeVar, cast

import torch

from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device

from . import heap
from .columns import Storages
from .known import Known, Under
from .parts import pieced, plain, strided_parts

_cdata = attrgetter("_cdata")
_is_leaf, _grad = attrgetter("is_leaf"), attrgetter("grad")
_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
_T = TypeVar("_T")
#: Where memory may be besides the job's device.
_HOST = ("cpu", "meta")
_BARE = "a bare storage"
_BLOCK = 512


def sweep(device: Device) -> Storages:
    """All live storages of ``device`` with at least one byte.

    Raises
    ------
    SuspendRefusedError
        If a live object forbids emptying the device storage by storage (a captured CUDA graph), or if there
        is memory on a further device (another GPU), which would not be emptied.
    """
    live = heap.instances(torch.Tensor, torch.UntypedStorage, *device.obstacles)
    _refuse_obstacles(live[2:], device)
    return _storages(live[0], live[1], device)


def check_alone(device: Device) -> None:
    """For a route that does not sweep: refuse memory on further devices, as `sweep` does."""
    live = heap.instances(torch.Tensor, torch.UntypedStorage)
    _storages(live[0], live[1], device)


def _storages(
    tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage], device: Device
) -> Storages:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        found = _Found(device)
        # Taken away meanwhile: a look that does not come to its end leaves nothing half known.
        notes = heap.notes(torch.Tensor)
        known = cast(Known, notes.pop(device, None)) or Known()
        found.add_tensors(tensors, known)
        found.add_gradients()
        found.add_bare(storages)
        notes[device] = known
        return found.storages()


def _blocks(objects: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """In portions of which what is asked of one object after the other stays in the processor's cache."""
    return (objects[start : start + _BLOCK] for start in range(0, len(objects), _BLOCK))


def live_instances(*kinds: type) -> list[list[Any]]:
    """For each of these types every live object of it, or of types derived from it.

    The collector also shows objects that no Python code refers to any more and C++ keeps for later. A new
    reference to such a one keeps nothing alive until torch is told of it (``_fix_weakref``).
    """
    found = heap.instances(*kinds)
    with torch._C.DisableTorchFunction():
        for number, kind in enumerate(kinds):
            if issubclass(kind, torch.Tensor):
                _each(torch.Tensor._fix_weakref, found[number])  # type: ignore[attr-defined]
            elif issubclass(kind, torch.UntypedStorage):
                found[number] = list(_firmly(found[number]))
    return found


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


class _Found:
    """The storages under tensors, and bare ones, as they are added block by block."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        #: Whether C++ code refers to any of the tensors, for whatever reason.
        self._referred = False
        #: The Python objects of all storages under tensors.
        self._under: list[int] = []
        #: The device's storages, some of them several times.
        self._found = Storages()

    def add_tensors(self, tensors: Sequence[torch.Tensor], known: Known) -> None:
        """Tensors and the storages under them, what is known of these from there."""
        old, start = len(known), 0
        for block in (*_blocks(tensors[:old]), *_blocks(tensors[old:])):
            self._ask(block)
            under = known.under(start, block)
            if under is not None:
                self._take(under)
            else:
                known.learn(start, block, self._look_under(block))
            start += len(block)

    def add_gradients(self) -> None:
        """Those of the tensors that C++ alone holds."""
        if self._gradients:
            known = set(map(id, self._tensors))
            further = {id(gradient): gradient for gradient in self._gradients}
            new = [gradient for key, gradient in further.items() if key not in known]
            self._ask(new)
            self._look_under(new)

    def add_bare(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Those that are under none of the tensors, when these have been added."""
        under = set(self._under)
        if not under.issuperset(map(id, storages)):
            bare = _firmly([item for item in storages if id(item) not in under])
            self._add(bare, [_BARE] * len(bare))

    def _ask(self, tensors: Sequence[torch.Tensor]) -> None:
        """What has to be asked of every tensor at every look."""
        _each(torch.Tensor._fix_weakref, tensors)  # type: ignore[attr-defined]
        self._tensors += tensors
        self._gradients += _gradients(tensors)
        self._referred = self._referred or max(map(_use_count, tensors), default=1) > 1

    def _look_under(self, tensors: Sequence[torch.Tensor]) -> Under | None:
        """Add the storages under tensors; what is there, if it will stay so while the tensors are over it."""
        described = plain(tensors)
        if described is None:
            self._add(*pieced(tensors))
            return None
        under = self._add(*described)
        # What is empty on a further device may grow.
        elsewhere = compress(under.storages, map(not_, under.ours))
        return under if all(storage.device.type in _HOST for storage in elsewhere) else None

    def _add(self, storages: Sequence[torch.UntypedStorage], labels: Sequence[str]) -> Under:
        ours = list(map(self._device.owns, storages))
        for storage, label in compress(zip(storages, labels, strict=True), map(not_, ours)):
            _refuse_elsewhere(storage, label, self._device)
        under = Under.of(storages, labels, ours)
        self._take(under)
        return under

    def _take(self, under: Under) -> None:
        """Those of the device."""
        self._under += map(id, under.storages)
        found, ours = self._found, under.ours
        storages = list(compress(under.storages, ours))
        found.storages += storages
        found.keys += compress(under.keys, ours)
        found.sizes += compress(under.sizes, ours)
        found.labels += compress(under.labels, ours)
        found.addresses += _addresses(storages)

    def storages(self) -> Storages:
        """Those of the device that have memory (fake, functional and wrapper tensors have none)."""
        found = self._found.once()
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


def _refuse_elsewhere(storage: torch.UntypedStorage, label: str, device: Device) -> None:
    """Unless it is no memory of a further device."""
    if storage.device.type in _HOST or storage.nbytes() == 0 or _address(storage) == 0:
        return
    from .naming import name_of  # late: it looks for names with what is defined here

    raise SuspendRefusedError(
        f"{name_of(storage, label)} is on {storage.device}, and the job's device is {device.name}",
        "keep the state of a process on one device, and name it with --device",
    )


def _refuse_obstacles(obstacles: Sequence[list[object]], device: Device) -> None:
    for found, (kind, reason) in zip(obstacles, device.obstacles.items(), strict=True):
        if found:
            raise SuspendRefusedError(f"there is a live {kind.__name__} on {device.name}: {reason}")
