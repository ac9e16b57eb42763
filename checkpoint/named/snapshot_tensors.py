"""The tensors of an opened snapshot as torch tensors, and their way into live ones, bit for bit."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gpuslice.checkpoint.discover.tensor_parts import SPARSE_PARTS
from gpuslice.checkpoint.format.layout import TensorSpec
from gpuslice.checkpoint.format.nodes import QuantizedNode, SparseNode, TensorNode
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError
from gpuslice.kernels.host import copies

#: Types of the same size: copying through them keeps every bit, of NaNs too, and works for every dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in SPARSE_PARTS}


def tensor_spec(path: str, tensor: torch.Tensor, sid: int) -> TensorSpec:
    """How a snapshot describes a strided tensor over storage ``sid``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(path, sid, dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class Source:
    """Reads the tensors of one snapshot; every storage is verified before it is used.

    Parameters
    ----------
    snapshot
        An opened snapshot; must stay open while this is used.
    verify
        Whether bytes are compared with their checksums; if not, only those that are asked for `strictly`.
    """

    def __init__(self, snapshot: SnapshotFile, *, verify: bool = True) -> None:
        self._snapshot = snapshot
        #: Storages that need not be compared any more; ``None``: nobody has begun to.
        self._proven: set[int] | None = None if verify else set(range(len(snapshot.storages)))
        self._strict = False

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """Inside, `verify` compares bytes in any case: those that torch takes at their word."""
        before, self._strict = self._strict, True
        try:
            yield
        finally:
            self._strict = before

    def spec(self, node: TensorNode) -> TensorSpec:
        """What the snapshot says about the entry."""
        if not 0 <= node.index < len(self._snapshot.tensors):
            raise RefusedSnapshotError(f"{self._snapshot.path} refers to a tensor that it does not hold")
        return self._snapshot.tensors[node.index]

    def key(self, node: TensorNode) -> tuple[Any, ...]:
        """What tells two entries apart that are not the same memory in the snapshot."""
        spec = self.spec(node)
        return spec.sid, spec.offset, spec.shape, spec.stride, spec.dtype

    def view(self, node: TensorNode) -> torch.Tensor:
        """The entry as a CPU tensor over the snapshot's own memory; only ever to be copied from."""
        return self.tensor(self.spec(node))

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """One of the snapshot's tensors as a CPU tensor over its own memory; only ever to be copied from."""
        self._check(spec.sid)
        empty = torch.empty(0, dtype=getattr(torch, spec.dtype))
        # Storages begin at multiples of 256 bytes, and therefore of every element's size.
        start = self._snapshot.offsets[spec.sid] // empty.element_size() + spec.offset
        return empty.set_(self._memory, start, spec.shape, spec.stride)

    def copy_into(self, live: torch.Tensor, node: TensorNode) -> None:
        """Copy the entry into a live tensor of the same shape and dtype."""
        copy_bits(live, self.view(node))

    def storage(self, sid: int, device: torch.device) -> torch.UntypedStorage:
        """A new storage on ``device`` with the bytes of one of the snapshot's."""
        self._check(sid)
        start, nbytes = self._snapshot.offsets[sid], self._snapshot.storages[sid].nbytes
        if device.type == "cpu":
            made = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
            threads = len(os.sched_getaffinity(0))
            copies.copy_in([(made, start)], self._snapshot.arena, None, threads)
            return made
        whole = torch.empty(0, dtype=torch.uint8).set_(self._memory, start, (nbytes,), (1,))
        return whole.to(device, copy=True).untyped_storage()

    def verify(self, node: TensorNode | SparseNode | QuantizedNode) -> None:
        """See whether the entry, and its gradient, can be loaded.

        Raises
        ------
        RefusedSnapshotError
            If it cannot be an entry.
        CorruptSnapshotError
            If its bytes are not what was written.
        """
        if not isinstance(node, TensorNode):
            self._verify_parts(node)
            return
        spec = self.spec(node)
        if self._strict and self._proven is not None:
            self._proven.discard(spec.sid)
        self._check(spec.sid)
        try:
            torch.device(node.device)
        except RuntimeError as error:
            raise RefusedSnapshotError(f"{spec.path} was on {node.device!r}, no device") from error
        dtype = getattr(torch, spec.dtype)
        if node.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise RefusedSnapshotError(f"{spec.path} was saved as {spec.dtype} that requires a gradient")
        if node.grad is not None:
            self.verify(node.grad)

    def _verify_parts(self, node: SparseNode | QuantizedNode) -> None:
        parts = [self.view(part) for part in node.parts]
        try:
            _assemble(node, parts)
        except (RuntimeError, ValueError, KeyError) as error:
            raise RefusedSnapshotError(f"{self.spec(node.parts[0]).path} is no tensor: {error}") from error

    def _check(self, sid: int) -> None:
        """Have a storage's bytes checked, the first time all of them together; ``CorruptSnapshotError``."""
        if self._proven is None:
            self._proven = self._sound()
        if sid not in self._proven:
            self._snapshot.view(sid)
            self._proven.add(sid)

    def _sound(self) -> set[int]:
        """All storages, or none if some byte is damaged: then only those that are needed have to be whole."""
        try:
            self._snapshot.verify()
        except CorruptSnapshotError:
            return set()
        return set(range(len(self._snapshot.storages)))

    @functools.cached_property
    def _memory(self) -> torch.UntypedStorage:
        """The whole snapshot, as the host has it mapped."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch dislikes read-only memory; nobody writes here
            return torch.frombuffer(self._snapshot.arena, dtype=torch.uint8).untyped_storage()


class Maker:
    """Makes new tensors from a snapshot; those that shared memory when they were saved share it again.

    Parameters
    ----------
    source
        Where the bytes come from.
    devices
        Where tensors of a recorded device go: learned from the live tensors that were matched.
    """

    def __init__(self, source: Source, devices: Mapping[str, torch.device]) -> None:
        self._source = source
        self._devices = devices
        self._made: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def onto(self, recorded: str, device: torch.device) -> Maker:
        """The same maker for what belongs to something that was on ``recorded`` and is on ``device`` now."""
        if self._devices.get(recorded) == device:
            return self
        other = copy.copy(self)
        other._devices = {**self._devices, recorded: device}
        return other

    def device(self, recorded: str) -> torch.device:
        """The device here for what was on ``recorded``."""
        if recorded in self._devices:
            return self._devices[recorded]
        device = torch.device(recorded)
        here = device.type == "cpu" or (
            device.type == "cuda" and torch.cuda.device_count() > (device.index or 0)
        )
        return device if here else torch.device("cpu")

    def make(
        self, node: TensorNode | SparseNode | QuantizedNode, device: torch.device | None = None
    ) -> torch.Tensor:
        """A new tensor as the node describes it, without gradient."""
        if isinstance(node, TensorNode):
            return self._strided(node, device).requires_grad_(node.requires_grad)
        made = _assemble(node, [self._strided(part, device) for part in node.parts])
        return made.requires_grad_(isinstance(node, SparseNode) and node.requires_grad)

    def _strided(self, node: TensorNode, device: torch.device | None) -> torch.Tensor:
        spec, target = self._source.spec(node), device or self.device(node.device)
        key = spec.sid, target
        if key not in self._made:
            self._made[key] = self._source.storage(*key)
        empty = torch.empty(0, dtype=getattr(torch, spec.dtype), device=target)
        return empty.set_(self._made[key], spec.offset, spec.shape, spec.stride)


def copy_bits(live: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``live`` of the same shape and dtype; strides and devices may differ."""
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        target = live.detach()
        if target.is_conj() or target.is_neg():
            target.copy_(source)
            return
        bits = _BITS[live.element_size()]
        _once(target).view(bits).copy_(_once(source).view(bits))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    return torch.equal(*(tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (first, second)))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions of ``expand``: each element of memory at most once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _assemble(node: SparseNode | QuantizedNode, parts: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(node, QuantizedNode):
        return _quantized(parts, node.axis)
    if node.layout == "sparse_coo":
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, node.shape, is_coalesced=node.coalesced, check_invariants=True
        )
    compressed, plain, values = parts
    layout = _LAYOUTS[node.layout]
    return torch.sparse_compressed_tensor(
        compressed, plain, values, node.shape, layout=layout, check_invariants=True
    )


def _quantized(parts: list[torch.Tensor], axis: int | None) -> torch.Tensor:
    integers, scales, zero_points = parts
    made: torch.Tensor
    if axis is None:
        made = torch.ops.aten._make_per_tensor_quantized_tensor(integers, float(scales), int(zero_points))
    else:
        made = torch.ops.aten._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)
    return made
