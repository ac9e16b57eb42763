"""What one suspend takes along: decided completely before anything is touched."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat, starmap
from operator import attrgetter, is_
from typing import ClassVar

import torch

from gpuslice.checkpoint.discover.storages import LiveStorage
from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named.snapshot_tensors import tensor_spec
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device, Way
from gpuslice.kernels.transfer import Transfer

from .move import check_movable

_cdata = attrgetter("_cdata")
_KNOWN = "another library knows its address"


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Storages to copy and empty, storages only to copy, and what stays.

    Attributes
    ----------
    storages
        Copied and emptied, in columns of the same order; one's number in the snapshot is its position.
    keys
        Their ``_cdata``.
    ways
        How each is emptied.
    extras
        Named tensors' storages that are copied only, because they live elsewhere or stay resident.
    resident_bytes
        Bytes that stay on the device, by reason.
    """

    #: Whether storages may leave and come by themselves, in any order.
    in_parts: ClassVar[bool] = True
    layout: Layout
    storages: Sequence[torch.UntypedStorage]
    keys: Sequence[int]
    ways: Sequence[Way]
    extras: tuple[torch.UntypedStorage, ...]
    tensors: tuple[TensorSpec, ...]
    resident_bytes: dict[str, int]

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each of the storages."""
        return self.layout.sizes[: len(self.storages)]

    @property
    def emptied_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(self.sizes)

    def bytes_of(self, keys: Collection[int]) -> int:
        """Bytes of the storages with these keys."""
        return sum(compress(self.sizes, map(keys.__contains__, self.keys)))

    def freed(self, at_least_bytes: int) -> dict[int, int]:
        """Key and position of the storages of so many bytes that have no memory while they are away."""
        rows = enumerate(zip(self.keys, self.sizes, self.ways, strict=True))
        return {key: sid for sid, (key, size, way) in rows if size >= at_least_bytes and way is Way.FREED}

    def unaccounted_bytes(self, device: Device) -> int:
        """After `empty`: what the allocator still counts as live and no found storage explains."""
        allocated_bytes = device.memory().allocated_bytes
        return 0 if allocated_bytes is None else max(0, allocated_bytes - sum(self.resident_bytes.values()))

    def check_movable(self, device: Device) -> None:
        """Refuse what must stay on its device, by name: ``SuspendRefusedError``."""
        if device.name.further:
            raise SuspendRefusedError(
                f"a state on several GPUs cannot move off {device.name}",
                "resume on the devices it was suspended from",
            )
        for way, spec in zip(self.ways, self.layout.storages, strict=False):
            if way is not Way.FREED:
                raise SuspendRefusedError(
                    f"{spec.label} cannot move off {device.name}: its memory belongs to another library",
                    "resume on the device it was suspended from",
                )
        for reason, nbytes in self.resident_bytes.items():
            raise SuspendRefusedError(
                f"{nbytes} bytes cannot move off {device.name}: {reason}",
                "resume on the device it was suspended from, or drop what refers to them before a move",
            )
        check_movable(self.storages)

    def moved_to(self, device: Device) -> CapturePlan:
        """The same plan, which is movable, over new storages on another device.

        Raises
        ------
        DeviceMemoryError
            If they do not fit.
        """
        storages = device.allocate(self.sizes)
        return replace(self, storages=storages, keys=list(map(_cdata, storages)))

    def copy_out(self, device: Device, writer: SnapshotWriter) -> Transfer:
        """Copy everything into the arena."""
        return writer.take(device, zip([*self.storages, *self.extras], writer.offsets, strict=True))

    def empty(self, device: Device, sids: Sequence[int] | None = None) -> None:
        """Take the memory away from these, or from all; what is empty already stays so."""
        for way, leave in ((Way.FREED, device.free), (Way.DISCARDED, device.discard)):
            if sids is None:
                leaving = list(compress(self.storages, map(is_, self.ways, repeat(way))))
            else:
                leaving = [self.storages[sid] for sid in sids if self.ways[sid] is way]
            if leaving:  # a device knows only the ways that it names itself
                leave(leaving)
        device.release_caches()

    def reserve(self, device: Device, sids: Iterable[int] | None = None) -> None:
        """Take the memory of these back, or of all: all of it or none; ``DeviceMemoryError``."""
        wanted = range(len(self.storages)) if sids is None else sids
        freed = (sid for sid in wanted if self.ways[sid] is Way.FREED)
        device.reserve([(self.storages[sid], self.layout.sizes[sid]) for sid in freed])

    def copy_in(
        self, device: Device, snapshot: SnapshotFile, *, verify: bool, later: Container[int] = ()
    ) -> Transfer:
        """Copy the storages' bytes to where they were, but of those whose keys are in ``later``.

        Raises
        ------
        CorruptSnapshotError
            Names a damaged storage.
        """
        now = [key not in later for key in self.keys]
        pairs = list(compress(zip(self.storages, snapshot.offsets, strict=False), now))
        return device.copy_in(pairs, snapshot.arena, snapshot.verifier() if verify else None)

    def copy_in_later(
        self, device: Device, snapshot: SnapshotFile, *, verify: bool, later: Mapping[int, int]
    ) -> Callable[[], Transfer]:
        """A function that copies what `copy_in` left, in the order of ``later``."""
        arena, verifier = snapshot.arena, snapshot.verifier() if verify else None

        def copy() -> Transfer:
            rows = zip(self.keys, self.storages, snapshot.offsets, strict=False)
            left = sorted((later[key], storage, offset) for key, storage, offset in rows if key in later)
            return device.copy_in([(storage, offset) for _, storage, offset in left], arena, verifier)

        return copy


def plan_capture(
    device: Device, found: Sequence[LiveStorage], named: Sequence[tuple[str, torch.Tensor]], *, alone: bool
) -> CapturePlan:
    """Decide what happens to every found storage and to those of the named tensors.

    Raises
    ------
    SuspendRefusedError
        Naming a named tensor that lives on another device.
    """
    fixed = {one.key for one in found if one.fixed}
    holds = device.holds([one.storage for one in found], fixed=fixed, alone=alone)
    taken: list[LiveStorage] = []
    ways: list[Way] = []
    resident: Counter[str] = Counter()
    for one, hold in zip(found, holds, strict=True):
        if hold.way is Way.RESIDENT or one.foreign:
            resident[hold.reason or _KNOWN] += one.nbytes
        else:
            taken.append(one)
            ways.append(hold.way)
    sids = {one.key: sid for sid, one in enumerate(taken)}
    extras: list[torch.UntypedStorage] = []
    described: list[tuple[int, str, str]] = []
    for path, tensor in named:
        storage = tensor.untyped_storage()
        if storage._cdata not in sids:
            _refuse_elsewhere(device, path, storage)
            sids[storage._cdata] = len(sids)
            described.append((storage.nbytes(), str(storage.device), path))
            extras.append(storage)
    sizes, labels = tuple(one.nbytes for one in taken), tuple(one.label for one in taken)
    return CapturePlan(
        capture_layout(_places(device, taken), sizes, labels, tuple(described)),
        [one.storage for one in taken],
        [one.key for one in taken],
        ways,
        tuple(extras),
        tuple(tensor_spec(path, tensor, sids[tensor.untyped_storage()._cdata]) for path, tensor in named),
        dict(resident),
    )


def _places(device: Device, taken: Sequence[LiveStorage]) -> tuple[str, ...]:
    """The device of each storage; only that of the job, if it has no further ones."""
    if not device.name.further:
        return (str(device.torch_device),)
    return tuple(str(one.storage.device) for one in taken)


@functools.lru_cache(maxsize=4)  # as in `layout.place`
def capture_layout(
    places: tuple[str, ...],
    sizes: tuple[int, ...],
    labels: tuple[str, ...],
    extras: tuple[tuple[int, str, str], ...],
) -> Layout:
    """The layout of storages at `_places`, and behind them of ``(nbytes, device, label)``."""
    specs = map(StorageSpec, sizes, repeat(places[0]) if len(places) == 1 else places, labels)
    return Layout((*specs, *starmap(StorageSpec, extras)))


def _refuse_elsewhere(device: Device, path: str, storage: torch.UntypedStorage) -> None:
    if storage.device.type != "cpu" and not device.owns(storage):
        raise SuspendRefusedError(
            f"{path} lives on {storage.device}, the job on {device.name}", "keep named state on one device"
        )
