"""Distributed tensors (``DTensor``): a rank saves the part that it has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from gpuslice.checkpoint.format.nodes import ShardNode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DescribeLocal = Callable[[torch.Tensor, str], Any]
#: Shape of the whole, placements, shape of the mesh, this rank's position.
Layout = tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], tuple[int, ...]]


def is_distributed(value: object) -> bool:
    """Whether it is a ``DTensor``; a process that has not imported that module has none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a distributed tensor."""
    local: torch.Tensor = cast("DTensor", tensor)._local_tensor
    return local.detach()


def shard_node(tensor: torch.Tensor, path: str, describe: DescribeLocal) -> ShardNode:
    """Describe a distributed tensor, with the gradient that it keeps; ``describe`` takes its local part."""
    local = describe(local_part(tensor), path)
    gradient = tensor.grad
    grad = None if gradient is None else shard_node(gradient.detach(), f"{path}.grad", describe)
    shape, placements, mesh, coordinate = layout_of(tensor)
    return ShardNode(local, shape, placements, mesh, coordinate, tensor.requires_grad, grad)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Shape of the whole, how it is placed, shape of the mesh, and where in it this rank is."""
    whole = cast("DTensor", tensor)
    mesh = whole.device_mesh
    placements = tuple(map(str, whole.placements))
    return tuple(whole.shape), placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())
