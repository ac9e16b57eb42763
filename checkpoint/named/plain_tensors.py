"""Plain strided tensors of a snapshot and the live ones for them: compared, and loaded in place or made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpuslice.checkpoint.format.layout import TensorSpec
from gpuslice.checkpoint.format.nodes import SparseNode, TensorNode
from gpuslice.errors import RefusedSnapshotError

from .describe import is_plain
from .snapshot_tensors import Maker, Source

LoadTensor = Callable[[Maker], torch.Tensor]


def alike(spec: TensorSpec, live: torch.Tensor) -> bool:
    """Whether dtype and shape are the same."""
    return live.dtype is getattr(torch, spec.dtype, None) and live.shape == spec.shape


def fits(source: Source, node: TensorNode, live: Any) -> bool:
    """Whether the live object is a plain leaf tensor with the entry's dtype, shape and strides."""
    if not (isinstance(live, torch.Tensor) and is_plain(live) and live.is_leaf):
        return False
    spec = source.spec(node)
    return alike(spec, live) and live.stride() == spec.stride


def into(source: Source, node: TensorNode, live: torch.Tensor) -> LoadTensor:
    """A function that loads an entry into a live tensor that is `alike`, with its gradient.

    Raises
    ------
    RefusedSnapshotError
        If the tensor cannot have the gradient that was saved of it.
    """
    if node.grad is not None and live.is_leaf:
        _check_gradient(source, node, node.grad, live)

    def load(maker: Maker) -> torch.Tensor:
        source.copy_into(live, node)
        if live.is_leaf:
            _complete(source, node, live, maker)
        return live

    return load


def into_or_new(
    source: Source, node: TensorNode, live: Any, device: torch.device | None = None
) -> LoadTensor:
    """A function that loads an entry into what is there, if it fits, or else makes a tensor.

    Parameters
    ----------
    device
        Where it must be; by default where the live one is, and a new one where it was.
    """
    if fits(source, node, live) and device in (None, live.device):
        return into(source, node, live)
    return lambda maker: maker.make(node, device)


def own_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[Any, Any]]:
    """By parameter, the state that may be loaded in place: beside its parameter, and nobody else's memory."""
    states = {
        parameter: state
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and type(state) is dict
    }
    tensors = [
        value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    if any(value.layout is not torch.strided for value in tensors):
        return {}
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        return {}
    return {
        parameter: state
        for parameter, state in states.items()
        if all(
            value.device == parameter.device
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name != "step"
        )
    }


def _check_gradient(
    source: Source, node: TensorNode, gradient: TensorNode | SparseNode, live: torch.Tensor
) -> None:
    values = source.spec(gradient if isinstance(gradient, TensorNode) else gradient.parts[-1])
    shape = values.shape if isinstance(gradient, TensorNode) else gradient.shape
    # Later versions of torch let a script say what its gradients are; `None`: anything.
    wanted = getattr(live, "grad_dtype", live.dtype)
    if shape != live.shape or wanted not in (None, getattr(torch, values.dtype, None)):
        raise RefusedSnapshotError(
            f"{source.spec(node).path} was saved with a gradient of {values.dtype} {list(shape)}, "
            "which it cannot have"
        )


def _complete(source: Source, node: TensorNode, live: torch.Tensor, maker: Maker) -> None:
    """What else a leaf has: whether it requires a gradient, and the one that it keeps."""
    if live.requires_grad != node.requires_grad:
        live.requires_grad_(node.requires_grad)
    if node.grad is None:
        live.grad = None
    elif isinstance(node.grad, TensorNode) and fits(source, node.grad, live.grad):
        assert live.grad is not None
        source.copy_into(live.grad, node.grad)
    else:
        live.grad = maker.make(node.grad, live.device)
