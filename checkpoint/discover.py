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
    tensors, storages, *obstacles = heap.look(torch.Tensor, torch.UntypedStorage, *device.obstacles)
    _refuse_obstacles([kind.alive() for kind in obstacles], device)
    return _storages(tensors, storages, device)


def check_alone(device: Device) -> None:
    """For a route that does not sweep: refuse memory on further devices, as `sweep` does."""
    tensors, storages = heap.look(torch.Tensor, torch.UntypedStorage)
    _storages(tensors, storages, device)


def _storages(tensors: heap.Kind, storages: heap.Kind, device: Device) -> Storages:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        live = tensors.alive()
        # Taken away meanwhile: a look that does not come to its end leaves nothing half known.
        known = cast(Known, tensors.notes.pop(device, None)) or Known()
        found = _Found(device, known)
        found.add_tensors(live)
        found.add_gradients()
        found.add_bare(storages)
        tensors.notes[device] = known
        return found.storages()


def _blocks(objects: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """In portions of which what is asked of one object after the other stays in the processor's cache."""
    return (objects[start : start + _BLOCK] for start in range(0, len(objects), _BLOCK))


def live_instances(*kinds: type) -> list[list[Any]]:
    """For each of these types every live object of it, or of types derived from it.

    The collector also shows objects that no Python code refers to any more and C++ keeps for later. A new
    reference to such a one keeps nothing alive until torch is told of it (``_fix_weakref``).
    """
    found = [kind.alive() for kind in heap.look(*kinds)]
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


def held_by_others(tensors: Sequence[torch.Tensor], *, gradient_nodes: bool = False) -> set[int]:
    """Ids of the tensors that C++ code refers to, beyond being a gradient or the base of a known view.

    Parameters
    ----------
    gradient_nodes
        Whether nodes that collect leaves' gradients are no such code; any graph, also a dead one, keeps them.
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


class _Found:
    """The storages under tensors, and bare ones, as they are added block by block."""

    def __init__(self, device: Device, known: Known) -> None:
        self._device = device
        self._known = known
        self._tensors: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        #: Whether C++ code refers to any of the tensors, for whatever reason.
        self._referred = False
        #: What is in the rows of what is known.
        self._rows: list[torch.UntypedStorage | None] = []
        #: Further storages of the device, some several times, and behind how many rows they were found.
        self._further = Storages()
        self._places: list[int] = []

    def add_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors and the storages under them, as far as possible from what is known."""
        known, start = self._known, 0
        old = len(known)
        for block in (*_blocks(tensors[:old]), *_blocks(tensors[old:])):
            self._ask(block)
            storages = known.same(start, block)
            if storages is None:
                under = self._look_under(block)
                known.learn(start, block, under)
                self._rows += [None] * len(block) if under is None else under.storages
            else:
                self._rows += storages
            start += len(block)

    def add_gradients(self) -> None:
        """Those of the tensors that C++ alone holds."""
        if self._gradients:
            known = set(map(id, self._tensors))
            further = {id(gradient): gradient for gradient in self._gradients}
            new = [gradient for key, gradient in further.items() if key not in known]
            self._ask(new)
            under = self._look_under(new)
            if under is not None:
                self._take(under)

    def add_bare(self, storages: heap.Kind) -> None:
        """Those that are under none of the tensors, when these have been added."""
        if self._known.covers(storages.references):
            return
        under = set(map(id, self._rows))
        bare = _firmly([item for item in storages.alive() if id(item) not in under])
        self._take(self._owned(bare, [_BARE] * len(bare)))
        if not bare:
            self._known.cover(storages.references)

    def _ask(self, tensors: Sequence[torch.Tensor]) -> None:
        """What has to be asked of every tensor at every look."""
        _each(torch.Tensor._fix_weakref, tensors)  # type: ignore[attr-defined]
        self._tensors += tensors
        self._gradients += _gradients(tensors)
        self._referred = self._referred or max(map(_use_count, tensors), default=1) > 1

    def _look_under(self, tensors: Sequence[torch.Tensor]) -> Under | None:
        """What is there, if it will stay so while the tensors are over it; otherwise take it."""
        described = plain(tensors)
        under = self._owned(*(described or pieced(tensors)))
        # What is empty on a further device may grow.
        elsewhere = compress(under.storages, map(not_, under.ours))
        if described and all(storage.device.type in _HOST for storage in elsewhere):
            return under
        self._take(under)
        return None

    def _owned(self, storages: Sequence[torch.UntypedStorage], labels: Sequence[str]) -> Under:
        """And none of them is on a further device."""
        ours = list(map(self._device.owns, storages))
        for storage, label in compress(zip(storages, labels, strict=True), map(not_, ours)):
            _refuse_elsewhere(storage, label, self._device)
        return Under.of(storages, labels, ours)

    def _take(self, under: Under) -> None:
        """Those of the device."""
        ours, further = under.ours, self._further
        storages = list(compress(under.storages, ours))
        further.storages += storages
        further.keys += compress(under.keys, ours)
        further.sizes += compress(under.sizes, ours)
        further.labels += compress(under.labels, ours)
        further.addresses += _addresses(storages)
        self._places += [len(self._rows)] * len(storages)

    def storages(self) -> Storages:
        """Those of the device that have memory (fake, functional and wrapper tensors have none)."""
        rows = self._known.settled()
        storages = rows.pick(self._rows)
        found = Storages(storages, rows.keys, rows.sizes, _addresses(storages), rows.labels)
        if self._further:
            places = [*self._places, *rows.pick(range(len(self._rows)))]
            turns = sorted(range(len(places)), key=places.__getitem__)
            found = self._further.and_those(found).in_turns(turns).once()
        if 0 in found.addresses or 0 in self._further.sizes:
            found = found.those(list(map(mul, found.sizes, found.addresses)))
        if self._referred:
            found.fixed = self._fixed()
        if not all(map(torch.UntypedStorage.resizable, found.storages)):
            # Of what torch itself allocated, nothing lies over anything else.
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
