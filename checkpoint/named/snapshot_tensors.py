"""The tensors of an opened snapshot as torch tensors, and their way into live ones, bit for bit."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from gpuslice.checkpoint.format.layout import TensorSpec
from gpuslice.checkpoint.format.nodes import QuantizedNode, SparseNode, TensorNode
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError

from .batched_copy import BatchedCopy, over

#: Types of the same size: copying through them keeps every bit, of NaNs too, and works for every dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_sid = attrgetter("sid")
_LAYOUTS = {
    "sparse_coo": torch.sparse_coo,
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
}


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
        self._tensors = snapshot.tensors
        #: Storages that need not be compared any more; ``None``: nobody has begun to.
        self._proven: set[int] | None = None if verify else set(range(len(snapshot.storages)))
        self._strict = False
        self._wanted: dict[int, None] = {}  # in the order in which they were asked for
        self._devices: set[str] = set()
        self._batch = BatchedCopy(snapshot)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """What `verify` was asked for inside the block is right at its end; ``CorruptSnapshotError``."""
        yield
        self._check(self._wanted)

    @contextmanager
    def strictly(self) -> Iterator[None]:
        """Inside, `verify` has bytes compared in any case: those that torch takes at their word."""
        before, self._strict = self._strict, True
        try:
            yield
        finally:
            self._strict = before

    def copy_into(self, lives: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        """Copy tensors into live ones of the same shapes and dtypes, as if in turn; done when `settle`d."""
        if self._batch.take(lives, specs):
            return
        for live, spec in zip(lives, specs, strict=True):
            if not self._batch.take([live], [spec]):
                self.settle()
                copy_bits(live, self.tensor(spec))

    def new(self, specs: Sequence[TensorSpec], device: torch.device) -> list[torch.Tensor]:
        """Tensors over new memory on ``device``, each for all of its storage; there when it is `settled`."""
        self._check(map(_sid, specs))
        if device.type == "cpu":
            return self._batch.new(specs)
        return [self._elsewhere(spec, device) for spec in specs]

    def _elsewhere(self, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        start, nbytes = self._snapshot.offsets[spec.sid], self._snapshot.storages[spec.sid].nbytes
        whole = torch.empty(0, dtype=torch.uint8).set_(self._memory, start, (nbytes,), (1,))
        return over(whole.to(device, copy=True).untyped_storage(), spec)

    def settle(self) -> None:
        """Do the copies that were left for later: before anybody looks at their targets."""
        self._batch.deliver()

    def restart(self) -> None:
        """Forget the copies that were left for later."""
        self._batch.drop()

    def key(self, node: TensorNode) -> tuple[Any, ...]:
        """What tells two entries apart that are not the same memory in the snapshot."""
        spec = self.spec(node)
        return (spec.sid, spec.offset, spec.shape, spec.stride, spec.dtype)

    def view(self, node: TensorNode) -> torch.Tensor:
        """The entry as a CPU tensor over the snapshot's own memory; only ever to be copied from."""
        return self.tensor(self.spec(node))

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """One of the snapshot's tensors as a CPU tensor over its own memory; only ever to be copied from."""
        self._check([spec.sid])
        empty = torch.empty(0, dtype=getattr(torch, spec.dtype))
        # Storages begin at multiples of 256 bytes, and therefore of every element's size.
        start = self._snapshot.offsets[spec.sid] // empty.element_size() + spec.offset
        return empty.set_(self._memory, start, spec.shape, spec.stride)

    def verify(self, nodes: Iterable[TensorNode | SparseNode | QuantizedNode]) -> None:
        """Have the entries' bytes, and those of their gradients, be right at the end of `looking`.

        Raises
        ------
        RefusedSnapshotError
            If one cannot be an entry.
        CorruptSnapshotError
            If its bytes have to be looked at for that, and are not what was written.
        """
        plain: list[TensorNode] = []
        for node in nodes:
            if isinstance(node, TensorNode):
                plain.append(node)
            else:
                self._verify_parts(node)
        specs = self.specs(plain)
        wanted = dict.fromkeys(map(_sid, specs))
        self._wanted.update(wanted)
        if self._strict and self._proven is not None:
            self._proven -= wanted.keys()
        for device in {node.device: None for node in plain}.keys() - self._devices:
            try:
                torch.device(device)
            except RuntimeError as error:
                path = next(
                    spec.path for node, spec in zip(plain, specs, strict=True) if node.device == device
                )
                raise RefusedSnapshotError(f"{path} was on {device!r}, no device") from error
            self._devices.add(device)
        trained = [spec for node, spec in zip(plain, specs, strict=True) if node.requires_grad]
        for dtype in {spec.dtype for spec in trained}:
            kind = getattr(torch, dtype)
            if not kind.is_floating_point and not kind.is_complex:
                path = next(spec.path for spec in trained if spec.dtype == dtype)
                raise RefusedSnapshotError(f"{path} was saved as {dtype} that requires a gradient")
        gradients = [node.grad for node in plain if node.grad is not None]
        if gradients:
            self.verify(gradients)

    def _verify_parts(self, node: SparseNode | QuantizedNode) -> None:
        parts = [self.view(part) for part in node.parts]
        try:
            _assemble(node, parts)
        except (RuntimeError, ValueError, KeyError) as error:
            raise RefusedSnapshotError(f"{self.spec(node.parts[0]).path} is no tensor: {error}") from error

    def spec(self, node: TensorNode) -> TensorSpec:
        """What the snapshot says about the entry."""
        return self.specs([node])[0]

    def specs(self, nodes: Sequence[TensorNode]) -> list[TensorSpec]:
        """What the snapshot says about each."""
        numbers = [node.index for node in nodes]
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self._tensors):
            raise RefusedSnapshotError(f"{self._snapshot.path} refers to a tensor that it does not hold")
        return list(map(self._tensors.__getitem__, numbers))

    def _check(self, sids: Iterable[int]) -> None:
        """Have storages' bytes checked, all of them at the first time; ``CorruptSnapshotError``."""
        if self._proven is None:
            self._proven = self._sound()
        for sid in sids:
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
        #: By storage and device the first tensor over it.
        self._made: dict[tuple[int, torch.device], torch.Tensor] = {}

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
        """A new tensor as the node describes it, without gradient; its values are there after `settle`."""
        if isinstance(node, TensorNode):
            return self.make_all([node], device)[0]
        parts = self._strided(node.parts, device)
        self.settle()
        made = _assemble(node, parts)
        return made.requires_grad_(isinstance(node, SparseNode) and node.requires_grad)

    def make_all(self, nodes: Sequence[TensorNode], device: torch.device | None = None) -> list[torch.Tensor]:
        """`make`, for many at once."""
        made = self._strided(nodes, device)
        for node, tensor in zip(nodes, made, strict=True):
            if node.requires_grad:
                tensor.requires_grad_()
        return made

    def settle(self) -> None:
        """Do the copies that were left for later: before anybody looks at what was made or loaded."""
        self._source.settle()

    def _strided(self, nodes: Sequence[TensorNode], device: torch.device | None) -> list[torch.Tensor]:
        there = {name: device or self.device(name) for name in {node.device for node in nodes}}
        specs, targets = self._source.specs(nodes), [there[node.device] for node in nodes]
        keys = list(zip(map(_sid, specs), targets, strict=True))
        # The first one over each storage that is not there yet: it is made with it.
        first: dict[tuple[int, torch.device], TensorSpec] = {}
        for key, spec in zip(keys, specs, strict=True):
            if key not in self._made:
                first.setdefault(key, spec)
        fresh: dict[int, torch.Tensor] = {}
        for target in dict.fromkeys(targets):
            new = {key: spec for key, spec in first.items() if key[1] == target}
            tensors = self._source.new(list(new.values()), target)
            self._made.update(zip(new, tensors, strict=True))
            fresh.update(zip(map(id, new.values()), tensors, strict=True))
        return [
            fresh.pop(id(spec)) if id(spec) in fresh else over(self._made[key].untyped_storage(), spec)
            for key, spec in zip(keys, specs, strict=True)
        ]


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
