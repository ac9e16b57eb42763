"""The plan of one suspend: what is copied and emptied, decided completely before anything is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpuslice.checkpoint.discover.storages import LiveStorage
from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named.snapshot_tensors import NumberedStorages, tensor_spec
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device, Way, storage_access
from gpuslice.kernels.transfer import Transfer

from .move import check_movable

_KNOWN = "another library knows its address"


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What a suspend does with each storage: copy and empty it, only copy it, or leave it.

    Attributes
    ----------
    storages
        Copied and emptied; one's number in the snapshot is its position.
    ways
        How each is emptied.
    extras
        Named tensors' storages that are copied only, because they live elsewhere or stay resident.
    resident_bytes
        Bytes that stay on the device, by reason.
    guarded
        Storages that torch refuses to touch while the job is suspended.
    """

    layout: Layout
    storages: Sequence[torch.UntypedStorage]
    ways: Sequence[Way]
    extras: tuple[torch.UntypedStorage, ...]
    tensors: tuple[TensorSpec, ...]
    resident_bytes: dict[str, int]
    guarded: Sequence[torch.UntypedStorage]

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each of the storages."""
        return self.layout.sizes[: len(self.storages)]

    @property
    def emptied_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(self.sizes)

    def unaccounted_bytes(self, device: Device) -> int:
        """Return the bytes, after `empty`, that the allocator counts and no found storage explains."""
        allocated_bytes = device.memory().allocated_bytes
        return 0 if allocated_bytes is None else max(0, allocated_bytes - sum(self.resident_bytes.values()))

    def check_movable(self, device: Device) -> None:
        """Raise ``SuspendRefusedError``, by name, for memory that must stay on its device."""
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
        """Return the same plan, which is movable, over new storages on another device.

        Raises
        ------
        DeviceMemoryError
            If they do not fit.
        """
        return replace(self, storages=device.allocate(self.sizes))

    def copy_out(self, device: Device, writer: SnapshotWriter) -> Transfer:
        """Copy all storages into the writer's arena, and return the statistics."""
        return writer.take(device, zip([*self.storages, *self.extras], writer.offsets, strict=True))

    def empty(self, device: Device) -> None:
        """Empty all storages; empty ones stay empty. Then torch refuses access to them."""
        storage_access.permit(self.guarded)  # a resume that is undone may not have permitted them yet
        self._leave(device)
        storage_access.forbid(self.guarded)

    def _leave(self, device: Device) -> None:
        for way, leave in ((Way.FREED, device.free), (Way.DISCARDED, device.discard)):
            its = [
                storage for storage, its_way in zip(self.storages, self.ways, strict=True) if its_way is way
            ]
            if its:  # a device has only the ways that it returns itself
                leave(its)
        device.release_caches()

    def reserve(self, device: Device) -> None:
        """Take the memory of all storages again, all or none (``DeviceMemoryError``), and allow access."""
        storage_access.permit(self.guarded)
        self._return(device)

    def _return(self, device: Device) -> None:
        device.reserve(list(zip(self.storages, self.sizes, strict=True)))

    def copy_in(self, device: Device, snapshot: SnapshotFile, *, verify: bool) -> Transfer:
        """Copy the bytes of all storages back, and return the statistics.

        Raises
        ------
        CorruptSnapshotError
            If a storage is damaged, naming it, and it is to ``verify``.
        """
        verifier = snapshot.verifier() if verify else None
        pairs = list(zip(self.storages, snapshot.offsets, strict=False))
        return device.copy_in(pairs, snapshot.arena, verifier, verifier)


def plan_capture(
    device: Device,
    found: Sequence[LiveStorage],
    named: Sequence[tuple[str, torch.Tensor]],
    *,
    guard_all: bool = False,
) -> CapturePlan:
    """Return the plan for every found storage, and for those of the named tensors.

    Parameters
    ----------
    guard_all
        True to make torch refuse access to memory that stays, too, so that all tensors behave alike.

    Raises
    ------
    SuspendRefusedError
        Naming a named tensor that lives on another device.
    """
    fixed = {one.key for one in found if one.fixed}
    exposed = {one.key for one in found if one.exposed}
    holds = device.holds([one.storage for one in found], fixed=fixed, exposed=exposed)
    taken: list[LiveStorage] = []
    ways: list[Way] = []
    resident: Counter[str] = Counter()
    for one, hold in zip(found, holds, strict=True):
        if hold.way is Way.RESIDENT or one.foreign:
            resident[hold.reason or _KNOWN] += one.nbytes
        else:
            taken.append(one)
            ways.append(hold.way)
    extras = NumberedStorages(
        [StorageSpec(one.nbytes, str(one.storage.device), one.label) for one in taken],
        {one.key: sid for sid, one in enumerate(taken)},
    )
    tensors = []
    for path, tensor in named:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" and not device.owns(storage):
            raise SuspendRefusedError(
                f"{path} lives on {storage.device}, the job on {device.name}",
                "keep named state on one device",
            )
        tensors.append(tensor_spec(path, tensor, extras.sid_of(storage, path)))
    return CapturePlan(
        Layout(tuple(extras.specs)),
        [one.storage for one in taken],
        ways,
        tuple(extras.storages),
        tuple(tensors),
        dict(resident),
        [one.storage for one in (found if guard_all else taken)],
    )
