"""Distributed tensors (``DTensor``): each rank saves its own part, and loads it into the same part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from gpuslice.checkpoint.format.nodes import ShardNode
from gpuslice.errors import RefusedSnapshotError

from .snapshot_tensors import LoadTensor, Maker, Source, alike, into

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: Shape of the whole, placements, shape of the mesh, this rank's position in it: as in a `ShardNode`.
Layout = tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], tuple[int, ...]]

_REMEDY = "restore on as many ranks, with the same parallel plan, as wrote the snapshot"


def is_distributed(value: object) -> bool:
    """Return True if the object is a ``DTensor``. Without that module imported there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a distributed tensor."""
    local: torch.Tensor = cast("DTensor", tensor)._local_tensor
    return local.detach()


def shard_node(tensor: torch.Tensor, path: str, describe: Callable[[torch.Tensor, str], Any]) -> ShardNode:
    """Return the node of a distributed tensor and its gradient. ``describe`` describes the local part."""
    local = describe(local_part(tensor), path)
    gradient = tensor.grad
    grad = None if gradient is None else shard_node(gradient.detach(), f"{path}.grad", describe)
    return ShardNode(local, *_layout(tensor), tensor.requires_grad, grad)


def load_shard(source: Source, node: ShardNode, live: Any, like: Any, path: str) -> LoadTensor:
    """Return a function that loads an entry into ``live``, or makes a new tensor on the mesh of ``like``.

    ``RefusedSnapshotError`` if ``like`` is no distributed tensor, or has another layout.
    """
    source.verify(node.local)
    if not is_distributed(like):
        raise RefusedSnapshotError(f"{path} is no distributed tensor here, but one was saved", _REMEDY)
    saved = node.shape, node.placements, node.mesh, node.coordinate
    if (here := _layout(like)) != saved:
        raise RefusedSnapshotError(f"{path} is {_told(here)} here, but {_told(saved)} was saved", _REMEDY)
    grad, load_grad, load_local = node.grad, None, None
    if grad is not None:
        load_grad = load_shard(source, grad, getattr(live, "grad", None), like, path)
    if is_distributed(live) and alike(source.spec(node.local), local_part(live)):
        load_local = into(source, node.local, local_part(live))

    def load(maker: Maker) -> torch.Tensor:
        if load_local is None:
            return _beside(maker.make(node.local, like.device), like).requires_grad_(node.requires_grad)
        load_local(maker)
        if live.is_leaf:
            live.requires_grad_(node.requires_grad)
            live.grad = None if load_grad is None else load_grad(maker)
        return cast("torch.Tensor", live)

    return load


def _layout(tensor: torch.Tensor) -> Layout:
    whole = cast("DTensor", tensor)
    mesh = whole.device_mesh
    placements = tuple(map(str, whole.placements))
    return tuple(whole.shape), placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())


def _beside(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    other = cast("DTensor", like)
    with torch.no_grad():
        return type(other).from_local(
            local,
            other.device_mesh,
            other.placements,
            run_check=False,
            shape=other.shape,
            stride=other.stride(),
        )


def _told(layout: Layout) -> str:
    shape, placements, mesh, coordinate = map(list, layout)
    return f"{shape}, placed {', '.join(map(str, placements))} on a mesh {mesh} at {coordinate}"
