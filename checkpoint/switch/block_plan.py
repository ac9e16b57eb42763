"""What one suspend takes along by the vmm route: the blocks of the device's memory, whatever is in them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import msgspec
import torch

from gpuslice.checkpoint.format.layout import Layout
from gpuslice.checkpoint.named.snapshot_tensors import tensor_spec
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Device, Way
from gpuslice.kernels.undo import undone_by
from gpuslice.kernels.vmm.shim import Block, Vmm

from .capture_plan import CapturePlan, capture_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan(CapturePlan):
    """All blocks of a device as storages, and named tensors that are in none of them.

    Their addresses stay: nothing is refused, nothing is resident, and nothing can move to another device.
    """

    in_parts: ClassVar[bool] = False
    shim: Vmm
    gpus: tuple[int, ...]

    def unaccounted_bytes(self, device: Device) -> int:
        """The allocator's bytes are all in the blocks."""
        return 0

    def check_movable(self, device: Device) -> None:
        """Never: addresses belong to their GPU."""
        raise SuspendRefusedError(
            f"a job under the route vmm cannot move off {device.name}",
            "resume it where it was, or run it with --route tensor",
        )

    def empty(self, device: Device, sids: Sequence[int] | None = None) -> None:
        """Take the memory of all away; the addresses stay reserved."""
        for gpu in self.gpus:
            self.shim.release(gpu)

    def reserve(self, device: Device, sids: Iterable[int] | None = None) -> None:
        """Take memory behind the addresses again, all of it or none; ``DeviceMemoryError``."""
        taken: list[int] = []

        def give_back() -> None:
            for gpu in taken:
                self.shim.release(gpu)

        with undone_by(give_back, f"taking memory of {device.name}"):
            for gpu in self.gpus:
                self.shim.reserve(gpu)
                taken.append(gpu)


def block_layout(shim: Vmm, device: Device) -> Layout:
    """Blocks as the storages of a snapshot."""
    return _layout(_blocks(shim, device), ())


def _blocks(shim: Vmm, device: Device) -> list[Block]:
    """All blocks, in the order of their addresses."""
    found = (block for gpu in device.name.indices for block in shim.blocks(gpu))
    return sorted(found, key=lambda block: block.address)


def _layout(blocks: Sequence[Block], extras: tuple[tuple[int, str, str], ...]) -> Layout:
    return capture_layout(
        tuple(f"cuda:{block.device}" for block in blocks),
        tuple(block.nbytes for block in blocks),
        tuple(f"block at {block.address:#x}" for block in blocks),
        extras,
    )


def plan_blocks(shim: Vmm, device: Device, named: Sequence[tuple[str, torch.Tensor]]) -> BlockPlan:
    """Take stock of a device's blocks, and say in which of them the named tensors are.

    The allocator's empty blocks are handed back first, so that they are not copied.
    """
    device.release_caches(workspaces=False)  # a captured graph goes on with those that it was captured with
    blocks = _blocks(shim, device)
    starts = [block.address for block in blocks]
    extras: dict[int, tuple[int, torch.UntypedStorage]] = {}
    described: list[tuple[int, str, str]] = []
    tensors = []
    for path, tensor in named:
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
        sid = bisect_right(starts, address) - 1
        if device.owns(storage) and sid >= 0 and blocks[sid].holds(address):
            offset = (address - starts[sid]) // tensor.element_size()
            tensors.append(msgspec.structs.replace(tensor_spec(path, tensor, sid), offset=offset))
            continue
        if storage._cdata not in extras:
            extras[storage._cdata] = len(blocks) + len(extras), storage
            described.append((storage.nbytes(), str(storage.device), path))
        tensors.append(tensor_spec(path, tensor, extras[storage._cdata][0]))
    storages = [_storage_of(block, device) for block in blocks]
    return BlockPlan(
        layout=_layout(blocks, tuple(described)),
        storages=storages,
        keys=[storage._cdata for storage in storages],
        ways=[Way.FREED] * len(storages),
        extras=tuple(storage for _, storage in extras.values()),
        tensors=tuple(tensors),
        resident_bytes={},
        shim=shim,
        gpus=device.name.indices,
    )


def _storage_of(block: Block, device: Device) -> torch.UntypedStorage:
    """A block's memory for torch to copy; it owns nothing, and outlives the memory."""
    place = torch.device(device.torch_device.type, block.device)
    storage = torch._C._construct_storage_from_data_pointer(block.address, place, block.nbytes)
    return cast("torch.UntypedStorage", storage)
