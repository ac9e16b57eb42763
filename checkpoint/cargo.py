"""What one suspend takes along: decided completely before anything is touched."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count, repeat
from operator import attrgetter, is_, not_

import msgspec
import torch

from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device, Hold, Way
from gpuslice.kernels.copying import Pairs
from gpuslice.kernels.transfer import Transfer

from .columns import Storages
from .layout import Layout, StorageSpec, TensorSpec
from .naming import name_of
from .snapshot import SnapshotFile
from .undo import undoing
from .writer import SnapshotWriter

_storage, _way = attrgetter("storage"), attrgetter("way")


class Item(msgspec.Struct, frozen=True, gc=False):
    """A storage that is copied and then emptied; its number in the snapshot is its position."""

    storage: torch.UntypedStorage
    nbytes: int
    way: Way


@dataclass(frozen=True, slots=True)
class Cargo:
    """Storages to copy and empty, storages only to copy, and what stays.

    Attributes
    ----------
    items
        Copied and emptied.
    extras
        Named tensors' storages that are copied only, because they live elsewhere or stay resident.
    resident_bytes
        Bytes that stay on the device, by reason.
    """

    layout: Layout
    items: tuple[Item, ...]
    extras: tuple[torch.UntypedStorage, ...]
    tensors: tuple[TensorSpec, ...]
    resident_bytes: dict[str, int]

    @property
    def emptied_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(item.nbytes for item in self.items)

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The items' storages."""
        return list(map(_storage, self.items))

    def unaccounted_bytes(self, device: Device) -> int:
        """After `empty`: what the allocator still counts as live and no found storage explains."""
        allocated_bytes = device.memory().allocated_bytes
        return 0 if allocated_bytes is None else max(0, allocated_bytes - sum(self.resident_bytes.values()))

    def moved_to(self, device: Device) -> Cargo:
        """The same cargo over new storages on another device.

        Raises
        ------
        SuspendRefusedError
            If something must keep its address.
        DeviceMemoryError
            If they do not fit.
        """
        for item, spec in zip(self.items, self.layout.storages, strict=False):
            if item.way is not Way.FREED:
                raise SuspendRefusedError(
                    f"{spec.label} cannot move to {device.name}: its memory belongs to another library",
                    "resume on the device it was suspended from",
                )
        storages = device.allocate([item.nbytes for item in self.items])
        items = [Item(s, item.nbytes, Way.FREED) for s, item in zip(storages, self.items, strict=True)]
        return replace(self, items=tuple(items))

    def copy_out(self, device: Device, writer: SnapshotWriter) -> Transfer:
        """Copy everything into the arena."""
        return writer.take(device, zip([*self.storages, *self.extras], writer.offsets, strict=True))

    def empty(self, device: Device) -> None:
        """Take the memory away from what was copied."""
        empty(device, self.items)

    def refill(
        self, device: Device, snapshot: SnapshotFile, *, verify: bool, later: Container[int] = ()
    ) -> Callable[[], Transfer]:
        """Take the memory back, all of it or none; return what copies the items' bytes to where they were.

        Storages whose ``_cdata`` is in ``later`` are left for `copy_in_later`.

        Raises
        ------
        DeviceMemoryError
            If there is not enough.
        CorruptSnapshotError
            By the function: names a damaged storage.
        """
        wanted = list(zip(self.storages, self.layout.sizes, snapshot.offsets, strict=False))
        late = [item.storage._cdata in later for item in self.items]
        first = list(compress(wanted, map(not_, late)))
        proof = snapshot.proof() if verify else None
        copy_in = device.refill(first, snapshot.arena, proof)
        if any(late):
            try:
                reserve(device, list(compress(self.items, late)), soon=False)
            except BaseException as error:
                with undoing(error, "taking memory back"):
                    empty(device, list(compress(self.items, map(not_, late))))
                raise
        return copy_in

    def check(self, snapshot: SnapshotFile) -> None:
        """Nothing yet: chunks are checked as they are copied."""

    def copy_in_later(
        self, device: Device, snapshot: SnapshotFile, *, verify: bool, later: Mapping[int, int]
    ) -> Callable[[], Transfer]:
        """A function that copies what `refill` left, in the order of ``later``."""
        arena, proof = snapshot.arena, snapshot.proof() if verify else None

        def copy() -> Transfer:
            pairs = [pair for pair in self._pairs(snapshot) if pair[0]._cdata in later]
            pairs.sort(key=lambda pair: later[pair[0]._cdata])
            return device.copy_in(pairs, arena, proof)

        return copy

    def _pairs(self, snapshot: SnapshotFile) -> Pairs:
        return list(zip(self.storages, snapshot.offsets, strict=False))


def empty(device: Device, items: Sequence[Item]) -> None:
    """Take the memory away from these; what is empty already stays so."""
    ways, storages = list(map(_way, items)), list(map(_storage, items))
    device.free(list(compress(storages, map(is_, ways, repeat(Way.FREED)))))
    device.discard(list(compress(storages, map(is_, ways, repeat(Way.DISCARDED)))))
    device.release_caches()


def reserve(device: Device, items: Sequence[Item], *, soon: bool = True) -> None:
    """Take the memory of these back, all of it or none; ``DeviceMemoryError``."""
    device.reserve([(item.storage, item.nbytes) for item in items if item.way is Way.FREED], soon=soon)


def load(device: Device, found: Storages, named: Sequence[tuple[str, torch.Tensor]], *, alone: bool) -> Cargo:
    """Decide what happens to every found storage and to those of the named tensors.

    Raises
    ------
    SuspendRefusedError
        Naming a tensor that cannot be taken along.
    """
    holds = device.holds(found.storages, fixed=found.fixed, alone=alone)
    ways = list(map(_way, holds))
    going = [True] * len(ways)
    resident: Counter[str] = Counter()
    if ways.count(Way.FREED) < len(ways):
        _refuse(device, found, holds, ways)
        going = [way is Way.FREED or way is Way.DISCARDED for way in ways]
        for nbytes, hold in compress(zip(found.sizes, holds, strict=True), map(not_, going)):
            resident[hold.reason] += nbytes
    taken = found.those(going)
    sids = dict(zip(taken.keys, count())) if named else {}
    extras: list[torch.UntypedStorage] = []
    described: list[tuple[int, str, str]] = []
    for path, tensor in named:
        storage = tensor.untyped_storage()
        if storage._cdata not in sids:
            _refuse_elsewhere(device, path, storage)
            sids[storage._cdata] = len(sids)
            described.append((storage.nbytes(), str(storage.device), path))
            extras.append(storage)
    return Cargo(
        _layout(str(device.torch_device), tuple(taken.sizes), tuple(taken.labels), tuple(described)),
        tuple(map(Item, taken.storages, taken.sizes, compress(ways, going))),
        tuple(extras),
        tuple(_spec(path, tensor, sids[tensor.untyped_storage()._cdata]) for path, tensor in named),
        dict(resident),
    )


@functools.lru_cache(maxsize=4)  # as in `layout.place`
def _layout(
    where: str, sizes: tuple[int, ...], labels: tuple[str, ...], extras: tuple[tuple[int, str, str], ...]
) -> Layout:
    """The layout of storages of the device ``where``, and behind them of ``(nbytes, device, label)``."""
    specs = map(StorageSpec, count(), sizes, repeat(where), labels)
    behind = (StorageSpec(sid, *extra) for sid, extra in enumerate(extras, len(sizes)))
    return Layout((*specs, *behind))


def _refuse(device: Device, found: Storages, holds: Sequence[Hold], ways: Sequence[Way]) -> None:
    if Way.REFUSED in ways:
        at = ways.index(Way.REFUSED)
        raise SuspendRefusedError(
            f"{name_of(found.storages[at], found.labels[at])} on {device.name} cannot be suspended: "
            f"{holds[at].reason}"
        )


def _refuse_elsewhere(device: Device, path: str, storage: torch.UntypedStorage) -> None:
    if storage.device.type != "cpu" and not device.owns(storage):
        raise SuspendRefusedError(
            f"{path} lives on {storage.device}, the job on {device.name}", "keep named state on one device"
        )


def _spec(path: str, tensor: torch.Tensor, sid: int) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(path, sid, dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
