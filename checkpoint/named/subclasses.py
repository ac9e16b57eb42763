"""Tensors of a class of their own: taken apart by ``__tensor_flatten__``, and made again by their class.

States of optimizers in 8 bits are such tensors. A snapshot has their parts and the class's name. The class
must be one that the process has defined, and nothing is unpickled. A tensor that cannot be taken apart is not
saved, and the snapshot says so: the job is suspended all the same, but no other process can continue from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpuslice.checkpoint.discover import heap
from gpuslice.checkpoint.format.nodes import (
    AnyTensorNode,
    FlattenedNode,
    QuantizedNode,
    ShardNode,
    SparseNode,
    TensorNode,
    UnsavedNode,
    ValueNode,
)
from gpuslice.errors import RefusedSnapshotError, UsageError

from .classes import name_of
from .snapshot_tensors import LoadTensor, Maker, Source, alike, fits, into, is_plain

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
Describe = Callable[[torch.Tensor, str], AnyTensorNode]


def is_of_own_class(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is more than torch's own kinds of memory, shape and gradient."""
    return type(tensor) not in _PLAIN or tensor.is_nested


def describe(tensor: torch.Tensor, path: str, part: Describe, strided: Describe) -> AnyTensorNode:
    """Return the node of a tensor of its own class; an ``UnsavedNode`` with the reason if it cannot be saved.

    Parameters
    ----------
    part, strided
        Describe a tensor that it is made of, and one as the memory that it is.

    Raises
    ------
    UsageError
        If it is the parameter of a lazy module, which has no value yet.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise UsageError(
            f"{path} is a {type(tensor).__name__}, which has no values yet",
            "run one batch through lazy modules first",
        )
    what = f"{path} is a {type(tensor).__name__}"
    if tensor.is_nested:
        return UnsavedNode(f"{what}, a nested tensor")
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return _as_memory(tensor, path, what, strided)
    if not hasattr(type(tensor), "__tensor_unflatten__"):
        return UnsavedNode(f"{what}, which has no __tensor_unflatten__")
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    try:
        saved = ValueNode.of(context, path)
        shape, stride = (tuple(map(int, numbers)) for numbers in (tensor.shape, tensor.stride()))
    except (UsageError, RuntimeError, TypeError):
        return UnsavedNode(f"{what}, whose __tensor_flatten__ gives more than tensors and plain values")
    inner = {name: getattr(tensor, name) for name in names}
    if not _comes_back(tensor, inner, context):
        return UnsavedNode(f"{what}, which its __tensor_unflatten__ does not make again")
    parts: dict[str, AnyTensorNode] = {}
    for name, one in inner.items():
        parts[name] = part(one, f"{path}.{name}")
        if isinstance(parts[name], UnsavedNode):
            return parts[name]
    grad = None if tensor.grad is None else part(tensor.grad.detach(), f"{path}.grad")
    return FlattenedNode(name_of(type(tensor)), saved, parts, shape, stride, tensor.requires_grad, grad)


def _comes_back(tensor: torch.Tensor, inner: Mapping[str, torch.Tensor], context: object) -> bool:
    """Return True if the class can rebuild a tensor of its own type from the parts. Nothing is copied."""
    kind: Any = type(tensor)
    try:
        made = kind.__tensor_unflatten__(dict(inner), context, tensor.shape, tensor.stride())
    except Exception:  # noqa: BLE001 - the class may raise anything, and the caller says that it does not work
        return False
    return type(made) is kind and made.shape == tensor.shape


def _as_memory(tensor: torch.Tensor, path: str, what: str, strided: Describe) -> AnyTensorNode:
    """Return the node of a tensor whose class only adds methods to a torch tensor."""
    if not torch._C._has_storage(tensor) or tensor.layout is not torch.strided:
        return UnsavedNode(f"{what}, which has no __tensor_flatten__")
    if vars(tensor):
        return UnsavedNode(f"{what}, which has no __tensor_flatten__ and an attribute {min(vars(tensor))!r}")
    with torch._C.DisableTorchFunctionSubclass():
        memory = strided(tensor, path)
        grad = None if tensor.grad is None else strided(tensor.grad, f"{path}.grad")
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    nothing = ValueNode.of(None, path)
    return FlattenedNode(
        name_of(type(tensor)), nothing, {"": memory}, shape, stride, tensor.requires_grad, grad
    )


def load(source: Source, node: FlattenedNode, live: Any, path: str, *, named: bool = False) -> LoadTensor:
    """Return a function that loads an entry into the live tensor, if it fits, or else makes a new one.

    Parameters
    ----------
    named
        True if the entry must be loaded into the live tensor.

    Raises
    ------
    RefusedSnapshotError
        If it does not fit, or the process has no such class, or that does not make a tensor of it.
    """
    kind = _find(node.kind, live, path)
    loads = _in_place(source, node, live, kind)
    if loads is None and named:
        raise RefusedSnapshotError(
            f"{path} has another layout or shape than was saved",
            "restore into the objects of the script that wrote the snapshot",
        )
    if loads is None:
        _put_together(
            source, kind, node, lambda one: _copy(source, one), path
        )  # fails early if the class cannot make one
        return lambda maker: _put_together(source, kind, node, lambda one: _make(maker, one), path)

    def load_in_place(maker: Maker) -> torch.Tensor:
        for load_part in loads:
            load_part(maker)
        if live.is_leaf:
            live.requires_grad_(node.requires_grad)
            live.grad = None if node.grad is None else make(source, maker, node.grad, path)
        return live  # type: ignore[no-any-return]

    return load_in_place


def make(source: Source, maker: Maker, node: AnyTensorNode, path: str) -> torch.Tensor:
    """Return a new tensor of any kind (plain, sparse, quantized, own class) except distributed ones."""
    if not isinstance(node, FlattenedNode):
        return _make(maker, node)
    kind = _find(node.kind, None, path)
    return _put_together(source, kind, node, lambda one: _make(maker, one), path)


def _in_place(
    source: Source, node: FlattenedNode, live: Any, kind: type[torch.Tensor]
) -> list[LoadTensor] | None:
    """Return functions that load each part into the live tensor's part; None if a part does not fit."""
    if type(live) is not kind or tuple(live.shape) != node.shape:
        return None
    if "" in node.parts:
        memory = node.parts[""]
        fitting = isinstance(memory, TensorNode) and is_plain(live) and alike(source.spec(memory), live)
        return [into(source, memory, live)] if isinstance(memory, TensorNode) and fitting else None
    names, context = live.__tensor_flatten__()  # type: ignore[attr-defined]
    if list(names) != list(node.parts) or ValueNode.of(context, "").data != node.context.data:
        return None
    loads: list[LoadTensor] = []
    for name, part in node.parts.items():
        inner = getattr(live, name)
        if isinstance(part, FlattenedNode):
            below = _in_place(source, part, inner, type(inner)) if name_of(type(inner)) == part.kind else None
            if below is None:
                return None
            loads += below
        elif isinstance(part, TensorNode) and fits(source, part, inner):
            loads.append(into(source, part, inner))
        else:
            return None
    return loads


def _put_together(
    source: Source,
    kind: type[torch.Tensor],
    node: FlattenedNode,
    new: Callable[[AnyTensorNode], torch.Tensor],
    path: str,
) -> torch.Tensor:
    parts = {
        name: _put_together(source, _find(part.kind, None, path), part, new, path)
        if isinstance(part, FlattenedNode)
        else new(part)
        for name, part in node.parts.items()
    }
    try:
        made = _made(kind, parts, node)
    except Exception as error:  # the class may raise anything
        raise RefusedSnapshotError(f"{path} cannot be made: {type(error).__name__}: {error}") from error
    if type(made) is not kind or tuple(made.shape) != node.shape:
        raise RefusedSnapshotError(f"{path} cannot be made: {kind.__name__} gives something else")
    return made.requires_grad_(node.requires_grad)


def _made(kind: Any, parts: Mapping[str, torch.Tensor], node: FlattenedNode) -> torch.Tensor:
    if "" in parts:
        made: torch.Tensor = parts[""].detach().as_subclass(kind)
        return made
    size = torch.Size(node.shape)
    unflattened: torch.Tensor = kind.__tensor_unflatten__(
        dict(parts), node.context.value(), size, node.stride
    )
    return unflattened


def _make(maker: Maker, node: AnyTensorNode) -> torch.Tensor:
    assert isinstance(node, (TensorNode, SparseNode, QuantizedNode))
    return maker.make(node).detach()


def _copy(source: Source, node: AnyTensorNode) -> torch.Tensor:
    """Return a copy of a part, so that the class may write to it and not to the snapshot."""
    assert isinstance(node, (TensorNode, SparseNode, QuantizedNode))
    return Maker(source, {}).make(node, torch.device("cpu")).detach()


def verify(source: Source, node: AnyTensorNode, path: str) -> None:
    """Check that an entry and all of its parts can be loaded. Raise ``SnapshotError`` if not."""
    if isinstance(node, UnsavedNode):
        raise RefusedSnapshotError(
            f"the snapshot lacks a tensor: {node.reason}", "start the job without the snapshot"
        )
    if isinstance(node, ShardNode):
        raise RefusedSnapshotError(f"{path} has distributed parts, which a tensor of its own class has not")
    if not isinstance(node, FlattenedNode):
        source.verify(node)
        return
    if "" in node.parts and len(node.parts) > 1:
        raise RefusedSnapshotError(f"{path} was saved with parts beside its memory")
    for part in [*node.parts.values(), *([] if node.grad is None else [node.grad])]:
        verify(source, part, path)


def _find(name: str, live: Any, path: str) -> Any:
    """Return the tensor class with a name: the live tensor's, or one that the process has defined."""
    if name_of(type(live)) == name:
        return type(live)
    found = [kind for kind in heap.family(torch.Tensor) if name_of(kind) == name]
    if len(found) != 1:
        raise RefusedSnapshotError(
            f"{path} was saved as a {name}, and {'several classes have' if found else 'none has'} that name",
            "define the class before gpuslice.attach, as the script did that wrote the snapshot",
        )
    return found[0]
