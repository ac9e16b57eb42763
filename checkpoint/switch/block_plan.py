"""The capture plan of the vmm route: the blocks of the device's memory, whatever they contain."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import torch

from gpuslice.checkpoint.discover.storages import LiveStorage
from gpuslice.checkpoint.format.layout import Layout, StorageSpec
from gpuslice.checkpoint.named.snapshot_tensors import NumberedStorages, tensor_spec
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device, Way
from gpuslice.kernels.undo import undone_by
from gpuslice.kernels.vmm.shim import Block, Vmm

from .capture_plan import CapturePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan(CapturePlan):
    """All blocks of a device as storages, and named tensors outside of them.

    Addresses stay, so nothing is refused, nothing is resident, and nothing can move to another device.
    """

    shim: Vmm
    gpus: tuple[int, ...]

    def unaccounted_bytes(self, device: Device) -> int:
        """Return 0: all of the allocator's bytes are in the blocks."""
        return 0

    def check_movable(self, device: Device) -> None:
        """Raise ``SuspendRefusedError``: addresses belong to their GPU."""
        raise SuspendRefusedError(
            f"a job under the route vmm cannot move off {device.name}",
            "resume it where it was, or run it with --route tensor",
        )

    def _leave(self, device: Device) -> None:
        """Release the physical memory of all blocks. Their addresses stay reserved."""
        for gpu in self.gpus:
            self.shim.release(gpu)

    def _return(self, device: Device) -> None:
        """Map memory behind all of the addresses again, or behind none and raise ``DeviceMemoryError``."""
        taken: list[int] = []

        def give_back() -> None:
            for gpu in taken:
                self.shim.release(gpu)

        with undone_by(give_back, f"taking memory of {device.name}"):
            for gpu in self.gpus:
                self.shim.reserve(gpu)
                taken.append(gpu)


def plan_blocks(
    shim: Vmm, device: Device, found: Sequence[LiveStorage], named: Sequence[tuple[str, torch.Tensor]]
) -> BlockPlan:
    """Return the plan of a device's blocks and named tensors. Empty blocks are released first, not copied."""
    device.release_caches(workspaces=False)  # a captured graph needs its workspaces
    unordered = (block for gpu in device.name.indices for block in shim.blocks(gpu))
    blocks = sorted(unordered, key=lambda block: block.address)
    starts = [block.address for block in blocks]
    extras = NumberedStorages(
        [
            StorageSpec(block.nbytes, f"cuda:{block.device}", f"block at {block.address:#x}")
            for block in blocks
        ],
        {},
    )
    tensors = []
    for path, tensor in named:
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
        sid = bisect_right(starts, address) - 1
        if device.owns(storage) and sid >= 0 and blocks[sid].holds(address):
            offset = (address - starts[sid]) // tensor.element_size()
            tensors.append(msgspec.structs.replace(tensor_spec(path, tensor, sid), offset=offset))
        else:
            tensors.append(tensor_spec(path, tensor, extras.sid_of(storage, path)))
    return BlockPlan(
        layout=Layout(tuple(extras.specs)),
        storages=[_storage_of(block, device) for block in blocks],
        ways=[Way.FREED] * len(blocks),
        extras=tuple(extras.storages),
        tensors=tuple(tensors),
        resident_bytes={},
        guarded=[one.storage for one in found],
        shim=shim,
        gpus=device.name.indices,
    )


def _storage_of(block: Block, device: Device) -> torch.UntypedStorage:
    """Return a block's memory as a storage for torch to copy. It owns nothing, and outlives the memory."""
    place = torch.device(device.torch_device.type, block.device)
    storage = torch._C._construct_storage_from_data_pointer(block.address, place, block.nbytes)
    return cast("torch.UntypedStorage", storage)
