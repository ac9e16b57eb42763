"""The tensors of an opened snapshot as torch tensors, and copying them into live ones, bit for bit."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from gpuslice.checkpoint.discover.tensor_parts import SPARSE_PARTS
from gpuslice.checkpoint.format.layout import StorageSpec, TensorSpec
from gpuslice.checkpoint.format.nodes import QuantizedNode, SparseNode, TensorNode
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError
from gpuslice.kernels.host import copies

#: Types by size: a copy through them keeps every bit, those of NaNs too, and works for every dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in SPARSE_PARTS}


def tensor_spec(path: str, tensor: torch.Tensor, sid: int) -> TensorSpec:
    """Return a snapshot's description of a strided tensor over storage ``sid``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(path, sid, dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class NumberedStorages:
    """Storages that a snapshot contains for named tensors only, numbered after its other storages.

    Parameters
    ----------
    specs
        Descriptions of the other storages; the list grows.
    sids
        Numbers of the other storages by ``_cdata``.
    """

    def __init__(self, specs: list[StorageSpec], sids: dict[int, int]) -> None:
        self.specs = specs
        self.storages: list[torch.UntypedStorage] = []
        self._sids = sids

    def sid_of(self, storage: torch.UntypedStorage, path: str) -> int:
        """Return the number of a storage. A new storage gets the next number."""
        if storage._cdata not in self._sids:
            self._sids[storage._cdata] = len(self.specs)
            self.specs.append(StorageSpec(storage.nbytes(), str(storage.device), path))
            self.storages.append(storage)
        return self._sids[storage._cdata]


def check_device(recorded: str, path: str) -> None:
    """Raise ``RefusedSnapshotError``, naming the path, unless ``recorded`` is the name of a torch device."""
    try:
        torch.device(recorded)
    except RuntimeError as error:
        raise RefusedSnapshotError(f"{path} was on {recorded!r}, no device") from error


def _dtype(spec: TensorSpec) -> torch.dtype:
    found = getattr(torch, spec.dtype, None)
    if not isinstance(found, torch.dtype):
        raise RefusedSnapshotError(
            f"{spec.path} is {spec.dtype}, which this torch does not know",
            "use the version of torch that wrote it, or a newer one",
        )
    return found


def _check_requires_grad(required: bool, spec: TensorSpec) -> None:
    dtype = _dtype(spec)
    if required and not (dtype.is_floating_point or dtype.is_complex):
        raise RefusedSnapshotError(f"{spec.path} was saved as {spec.dtype} that requires a gradient")


class Source:
    """Reads the tensors of one snapshot. Every storage is verified before it is used.

    Parameters
    ----------
    snapshot
        An opened snapshot; must stay open while this is used.
    verify
        True to compare bytes with their checksums.
    """

    def __init__(self, snapshot: SnapshotFile, *, verify: bool = True) -> None:
        self._snapshot = snapshot
        #: Storages that were verified; None before the first.
        self._proven: set[int] | None = None if verify else set(range(len(snapshot.storages)))
        self._strict: Source | None = None
        if not verify:
            self._strict = Source(snapshot)
            self._strict._proven = set()  # verify only storages in use, one by one

    @property
    def strict(self) -> Source:
        """A reader of the same snapshot that always verifies: for bytes that torch would use unchecked."""
        return self._strict or self

    def spec(self, node: TensorNode) -> TensorSpec:
        """Return the snapshot's description of the entry."""
        if not 0 <= node.index < len(self._snapshot.tensors):
            raise RefusedSnapshotError(f"{self._snapshot.path} refers to a tensor that it does not hold")
        return self._snapshot.tensors[node.index]

    def key(self, node: TensorNode) -> tuple[Any, ...]:
        """Return a key that two entries share only if they are the same memory in the snapshot."""
        spec = self.spec(node)
        return spec.sid, spec.offset, spec.shape, spec.stride, spec.dtype

    def view(self, node: TensorNode) -> torch.Tensor:
        """Return the entry as a CPU tensor over the snapshot's own memory. Only copy from it."""
        return self.tensor(self.spec(node))

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Return one of the snapshot's tensors as a CPU tensor over its own memory. Only copy from it."""
        self._check(spec.sid)
        empty = torch.empty(0, dtype=_dtype(spec))
        # Storages begin at multiples of 256 bytes, and therefore of every element's size.
        start = self._snapshot.offsets[spec.sid] // empty.element_size() + spec.offset
        return empty.set_(self._memory, start, spec.shape, spec.stride)

    def copy_into(self, live: torch.Tensor, node: TensorNode) -> None:
        """Copy the entry into a live tensor of the same shape and dtype. Strides and devices may differ."""
        with _mode_of(live), torch.no_grad():
            target, source = live.detach(), self.view(node)
            if target.is_conj() or target.is_neg():
                target.copy_(source)
                return
            bits = _BITS[live.element_size()]
            _once(target).view(bits).copy_(_once(source).view(bits))

    def storage_bytes(self, sid: int) -> int:
        """Return the size of one of the snapshot's storages."""
        return self._snapshot.storages[sid].nbytes

    def storage(self, sid: int, device: torch.device) -> torch.UntypedStorage:
        """Return a new storage on ``device`` with the bytes of one of the snapshot's storages."""
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
        """Check that the entry and its gradient can be loaded. ``SnapshotError`` names it if not."""
        if isinstance(node, TensorNode):
            spec = self.spec(node)
            self._check(spec.sid)
            check_device(node.device, spec.path)
            _check_requires_grad(node.requires_grad, spec)
            if node.grad is not None:
                self.verify(node.grad)
            return
        if not node.parts:
            raise RefusedSnapshotError(f"{self._snapshot.path} has a tensor that has no parts")
        for part in node.parts:
            self.verify(part)
        try:
            _assemble(node, [self.view(part) for part in node.parts])
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            path = self.spec(node.parts[0]).path
            raise RefusedSnapshotError(f"{path} is no tensor: {error}") from error
        if isinstance(node, SparseNode):
            _check_requires_grad(node.requires_grad, self.spec(node.parts[-1]))

    def _check(self, sid: int) -> None:
        """Verify a storage's bytes; at the first call those of all. Raise ``CorruptSnapshotError``."""
        if self._proven is None:
            self._proven = set()
            with suppress(CorruptSnapshotError):  # then storages are verified one by one
                self._snapshot.verify()
                self._proven.update(range(len(self._snapshot.storages)))
        if sid not in self._proven:
            self._snapshot.view(sid)
            self._proven.add(sid)

    @functools.cached_property
    def _memory(self) -> torch.UntypedStorage:
        """The whole snapshot, as it is mapped on the host."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of read-only memory; no code writes to it
            return torch.frombuffer(self._snapshot.arena, dtype=torch.uint8).untyped_storage()


class Maker:
    """Makes new tensors from a snapshot. Tensors that shared memory when they were saved share it again.

    ``devices`` maps recorded devices to present ones, as matched live tensors have shown.
    """

    def __init__(self, source: Source, devices: Mapping[str, torch.device]) -> None:
        self._source = source
        self._devices = devices
        self._made: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
        self._live: set[tuple[int, torch.device]] = set()

    def share(self, node: TensorNode, live: torch.Tensor) -> None:
        """Make new tensors share a live tensor's memory if they shared the memory of its entry."""
        spec, storage = self._source.spec(node), live.untyped_storage()
        same = live.storage_offset() == spec.offset and live.stride() == spec.stride
        if same and storage.nbytes() == self._source.storage_bytes(spec.sid):
            key = spec.sid, live.device
            if self._made.setdefault(key, storage) is storage:
                self._live.add(key)

    def onto(self, recorded: str, device: torch.device) -> Maker:
        """Return a maker that puts tensors recorded on ``recorded`` onto ``device``, and others as before."""
        if self._devices.get(recorded) == device:
            return self
        other = copy.copy(self)
        other._devices = {**self._devices, recorded: device}
        return other

    def device(self, recorded: str) -> torch.device:
        """Return the device on which to make a tensor that was recorded on ``recorded``."""
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
        """Return a new tensor as the node describes it, without gradient."""
        if isinstance(node, TensorNode):
            return self._strided(node, device).requires_grad_(node.requires_grad)
        made = _assemble(node, [self._strided(part, device) for part in node.parts])
        return made.requires_grad_(isinstance(node, SparseNode) and node.requires_grad)

    def _strided(self, node: TensorNode, device: torch.device | None) -> torch.Tensor:
        spec, target = self._source.spec(node), device or self.device(node.device)
        key = spec.sid, target
        if key not in self._made:
            self._made[key] = self._source.storage(*key)
        empty = torch.empty(0, dtype=_dtype(spec), device=target)
        made = empty.set_(self._made[key], spec.offset, spec.shape, spec.stride)
        if key in self._live:
            self._source.copy_into(made, node)
        return made


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors of one shape and dtype hold the same bytes."""
    return torch.equal(*(tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (first, second)))


def _mode_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which ``tensor`` can be written: inference mode on or off, as the tensor needs."""
    inference = tensor.is_inference()
    return (
        nullcontext() if torch.is_inference_mode_enabled() == inference else torch.inference_mode(inference)
    )


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with each element of its memory once: without the repetitions of ``expand``."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _assemble(node: SparseNode | QuantizedNode, parts: list[torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor
    if isinstance(node, QuantizedNode):
        integers, scales, zeros = parts
        if node.axis is None:
            made = torch.ops.aten._make_per_tensor_quantized_tensor(integers, float(scales), int(zeros))
        else:
            made = torch.ops.aten._make_per_channel_quantized_tensor(integers, scales, zeros, node.axis)
        return made
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


LoadTensor = Callable[[Maker], torch.Tensor]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is a strided view of one storage; a wrapper holds several."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and not hasattr(type(tensor), "__tensor_flatten__")


def alike(spec: TensorSpec, live: torch.Tensor) -> bool:
    """Return True if two tensors have the same dtype and shape."""
    return live.dtype is getattr(torch, spec.dtype, None) and live.shape == spec.shape


def fits(source: Source, node: TensorNode, live: Any) -> bool:
    """Return True if the live object is a plain leaf tensor with the entry's dtype, shape and strides."""
    if not (isinstance(live, torch.Tensor) and is_plain(live) and live.is_leaf):
        return False
    spec = source.spec(node)
    return alike(spec, live) and live.stride() == spec.stride


def into(source: Source, node: TensorNode, live: torch.Tensor) -> LoadTensor:
    """Return a function that loads an entry, and its gradient, into a live tensor that is `alike`.

    ``RefusedSnapshotError`` if the tensor cannot have the gradient that was saved.
    """
    if node.grad is not None and live.is_leaf:
        _check_gradient(source, node, node.grad, live)

    def load(maker: Maker) -> torch.Tensor:
        source.copy_into(live, node)
        maker.share(node, live)
        if live.is_leaf:
            _complete(source, node, live, maker)
        return live

    return load


def into_or_new(
    source: Source, node: TensorNode, live: Any, device: torch.device | None = None
) -> LoadTensor:
    """Return a function that loads an entry into the live tensor, if it fits, or else makes a new one.

    The tensor must be on ``device``. By default it is where the live one is, and a new one where it was.
    """
    if fits(source, node, live) and device in (None, live.device):
        return into(source, node, live)
    return lambda maker: maker.make(node, device)


def _check_gradient(
    source: Source, node: TensorNode, gradient: TensorNode | SparseNode, live: torch.Tensor
) -> None:
    values = source.spec(gradient if isinstance(gradient, TensorNode) else gradient.parts[-1])
    shape = values.shape if isinstance(gradient, TensorNode) else gradient.shape
    # Later versions of torch let a script set the dtype of gradients; None allows any.
    wanted = getattr(live, "grad_dtype", live.dtype)
    if shape != live.shape or wanted not in (None, getattr(torch, values.dtype, None)):
        raise RefusedSnapshotError(
            f"{source.spec(node).path} was saved with a gradient of {values.dtype} {list(shape)}, "
            "which it cannot have"
        )


def _complete(source: Source, node: TensorNode, live: torch.Tensor, maker: Maker) -> None:
    """Load what else a leaf has: whether it requires a gradient, and its gradient."""
    if live.requires_grad != node.requires_grad:
        live.requires_grad_(node.requires_grad)
    if node.grad is None:
        live.grad = None
    elif isinstance(node.grad, TensorNode) and fits(source, node.grad, live.grad):
        assert live.grad is not None
        source.copy_into(live.grad, node.grad)
    else:
        live.grad = maker.make(node.grad, live.device)
