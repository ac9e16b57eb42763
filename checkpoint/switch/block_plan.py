"""What one suspend takes along by the vmm route: the blocks of the device's memory, whatever is in them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device
from gpuslice.kernels.host.copies import run
from gpuslice.kernels.host.process_memory import view_address
from gpuslice.kernels.transfer import Transfer
from gpuslice.kernels.undo import undone_by
from gpuslice.kernels.vmm.shim import Block


class Shim(Protocol):
    """What ``kernels.vmm.Vmm`` does."""

    def blocks(self, device: int) -> list[Block]: ...
    def copy_out(self, pairs: Sequence[tuple[Block, int]]) -> None: ...
    def copy_in(self, pairs: Sequence[tuple[Block, int]]) -> None: ...
    def release(self, device: int) -> None: ...
    def reserve(self, device: int) -> None: ...


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All blocks of a device, and storages of named tensors that are in none of them.

    The same steps as ``capture_plan.CapturePlan``, by addresses that stay: nothing is refused, nothing is
    resident, and nothing can move to another device.
    """

    shim: Shim
    gpus: tuple[int, ...]
    layout: Layout
    blocks: tuple[Block, ...]
    extras: tuple[torch.UntypedStorage, ...]
    tensors: tuple[TensorSpec, ...]

    @property
    def emptied_bytes(self) -> int:
        """Bytes that leave the device."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Nothing that is found stays."""
        return {}

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """No storage changes."""
        return []

    def unaccounted_bytes(self, device: Device) -> int:
        """The allocator's bytes are all in the blocks."""
        del device
        return 0

    def check_movable(self, device: Device) -> None:
        """Never: addresses belong to their GPU."""
        raise SuspendRefusedError(
            f"a job under the route vmm cannot move off {device.name}",
            "resume it where it was, or run it with --route tensor",
        )

    def moved_to(self, device: Device) -> BlockPlan:
        """Not reached: `check_movable` comes first."""
        raise AssertionError(device)

    def copy_out(self, device: Device, writer: SnapshotWriter) -> Transfer:
        """Copy everything into the arena."""
        self.shim.copy_out([(block, view_address(writer.view(sid))) for sid, block in enumerate(self.blocks)])
        pairs = zip(self.extras, writer.offsets[len(self.blocks) :], strict=True)
        return self._transfer() + writer.take(device, pairs)

    def empty(self, device: Device) -> None:
        """Take the memory away; the addresses stay reserved."""
        del device
        for gpu in self.gpus:
            self.shim.release(gpu)

    def reserve(self, device: Device) -> None:
        """Take memory behind the addresses again, all of it or none; ``DeviceMemoryError``."""
        taken: list[int] = []

        def give_back() -> None:
            for gpu in taken:
                self.shim.release(gpu)

        with undone_by(give_back, f"taking memory of {device.name}"):
            for gpu in self.gpus:
                self.shim.reserve(gpu)
                taken.append(gpu)

    def copy_in(
        self, device: Device, snapshot: SnapshotFile, *, verify: bool, later: Container[int] = ()
    ) -> Transfer:
        """Copy the bytes back; `check` verifies them before that, and none comes later by this route."""
        del device, verify, later
        views = [snapshot.view(sid, verify=False) for sid in range(len(self.blocks))]
        pairs = zip(self.blocks, views, strict=True)
        self.shim.copy_in([(block, view_address(view)) for block, view in pairs])
        return self._transfer()

    def check(self, snapshot: SnapshotFile) -> None:
        """Check the blocks' bytes in the snapshot; ``CorruptSnapshotError`` names a damaged one."""

        def look(sid: int) -> None:
            snapshot.view(sid)

        run([[sid] for sid in range(len(self.blocks))], look, len(os.sched_getaffinity(0)))

    def _transfer(self) -> Transfer:
        return Transfer({"direct": self.emptied_bytes} if self.blocks else {}, copies=len(self.blocks))


def blocks_of(shim: Shim, device: Device) -> list[Block]:
    """All blocks, in the order of their addresses."""
    found = (block for gpu in device.name.indices for block in shim.blocks(gpu))
    return sorted(found, key=lambda block: block.address)


def block_layout(blocks: Sequence[Block]) -> Layout:
    """Blocks as the storages of a snapshot."""
    specs = (
        StorageSpec(block.nbytes, f"cuda:{block.device}", f"block at {block.address:#x}") for block in blocks
    )
    return Layout(tuple(specs))


def plan_blocks(shim: Shim, device: Device, named: Sequence[tuple[str, torch.Tensor]]) -> BlockPlan:
    """Take stock of a device's blocks, and say in which of them the named tensors are.

    The allocator's empty blocks are handed back first, so that they are not copied.
    """
    device.release_caches(workspaces=False)  # a captured graph goes on with those that it was captured with
    blocks = blocks_of(shim, device)
    starts = [block.address for block in blocks]
    specs = list(block_layout(blocks).storages)
    extras: dict[int, tuple[int, torch.UntypedStorage]] = {}
    tensors = []
    for path, tensor in named:
        sid = bisect_right(starts, tensor.data_ptr()) - 1
        if device.owns(tensor.untyped_storage()) and sid >= 0 and blocks[sid].holds(tensor.data_ptr()):
            offset = (tensor.data_ptr() - blocks[sid].address) // tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            if storage._cdata not in extras:
                extras[storage._cdata] = len(specs), storage
                specs.append(StorageSpec(storage.nbytes(), str(storage.device), path))
            sid, offset = extras[storage._cdata][0], int(tensor.storage_offset())
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(TensorSpec(path, sid, dtype, tuple(tensor.shape), tensor.stride(), offset))
    kept = tuple(storage for _, storage in extras.values())
    return BlockPlan(shim, device.name.indices, Layout(tuple(specs)), tuple(blocks), kept, tuple(tensors))
