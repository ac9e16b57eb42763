"""Plain strided tensors of a snapshot and the live ones for them, compared and loaded many at once.

A job has thousands of them, and what Python does for each would take longer than copying its bytes. So they
stand in lists of the same order, and C functions are asked about whole lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from operator import and_, attrgetter, eq, is_
from typing import Any

import torch

from gpuslice.checkpoint.format.layout import TensorColumns, columns
from gpuslice.checkpoint.format.nodes import SparseNode, TensorNode
from gpuslice.errors import RefusedSnapshotError

from .describe import is_plain
from .snapshot_tensors import Maker, Source

Loads = Callable[[Maker], list[torch.Tensor]]

_dtype = attrgetter("dtype")
_shape = attrgetter("shape")


def alike(tensors: TensorColumns, lives: Sequence[torch.Tensor]) -> list[bool]:
    """Of each pair whether dtype and shape are the same."""
    same_dtype = map(is_, map(_dtype, lives), map(_of_torch, tensors.dtypes))
    return list(map(and_, same_dtype, map(eq, map(_shape, lives), tensors.shapes)))


def into(source: Source, nodes: Sequence[TensorNode], lives: Sequence[torch.Tensor]) -> Loads:
    """A function that loads entries into live tensors that are `alike`, with their gradients.

    Raises
    ------
    RefusedSnapshotError
        If a tensor cannot have the gradient that was saved of it.
    """
    specs = source.specs(nodes)
    for node, live in zip(nodes, lives, strict=True):
        if node.grad is not None and live.is_leaf:
            _check_gradient(source, node, node.grad, live)

    def load(maker: Maker) -> list[torch.Tensor]:
        source.copy_into(lives, specs)
        for node, live in zip(nodes, lives, strict=True):
            if live.is_leaf:
                _complete(source, node, live, maker)
        return list(lives)

    return load


def into_or_new(
    source: Source, nodes: Sequence[TensorNode], lives: Sequence[Any], device: torch.device | None = None
) -> Loads:
    """A function that loads entries into those live tensors that they fit; for others, tensors are made.

    Parameters
    ----------
    lives
        What is there, whatever it is.
    device
        Where they must be; by default where they are, and new ones where they were.
    """
    fitting = fits(source, nodes, lives)
    if device is not None:
        fitting = [fit and live.device == device for fit, live in zip(fitting, lives, strict=True)]
    load_present = into(source, list(compress(nodes, fitting)), list(compress(lives, fitting)))
    missing = [node for node, fit in zip(nodes, fitting, strict=True) if not fit]

    def load(maker: Maker) -> list[torch.Tensor]:
        present, made = iter(load_present(maker)), iter(maker.make_all(missing, device))
        return [next(present if fit else made) for fit in fitting]

    return load


def fits(source: Source, nodes: Sequence[TensorNode], lives: Sequence[Any]) -> list[bool]:
    """Of each whether the live object is a plain leaf tensor with the entry's dtype, shape and strides."""
    able = [isinstance(live, torch.Tensor) and is_plain(live) and live.is_leaf for live in lives]
    if not any(able):
        return able
    tensors, those = columns(source.specs(list(compress(nodes, able)))), list(compress(lives, able))
    same_strides = map(eq, map(torch.Tensor.stride, those), tensors.strides)
    same = map(and_, alike(tensors, those), same_strides)
    return [fit and next(same) for fit in able]


def _check_gradient(
    source: Source, node: TensorNode, gradient: TensorNode | SparseNode, live: torch.Tensor
) -> None:
    values = source.spec(gradient if isinstance(gradient, TensorNode) else gradient.parts[-1])
    shape = values.shape if isinstance(gradient, TensorNode) else gradient.shape
    # Later versions of torch let a script say what its gradients are; `None`: anything.
    wanted = getattr(live, "grad_dtype", live.dtype)
    if shape != live.shape or wanted not in (None, _of_torch(values.dtype)):
        raise RefusedSnapshotError(
            f"{source.spec(node).path} was saved with a gradient of {values.dtype} {list(shape)}, "
            "which it cannot have"
        )


def _complete(source: Source, node: TensorNode, live: torch.Tensor, maker: Maker) -> None:
    """What else a leaf has: whether it requires a gradient, and the one that it keeps."""
    if live.requires_grad != node.requires_grad:
        live.requires_grad_(node.requires_grad)
    if node.grad is None:
        if live.grad is not None:
            live.grad = None
    elif (
        isinstance(node.grad, TensorNode)
        and live.grad is not None
        and all(fits(source, [node.grad], [live.grad]))
    ):
        source.copy_into([live.grad], source.specs([node.grad]))
    else:
        live.grad = maker.make(node.grad, live.device)


@functools.cache
def _of_torch(name: str) -> torch.dtype | None:
    """torch's dtype of that name, if this torch has one."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None
