"""Distributed tensors of a snapshot: loaded into the rank's part of the live ones, or made beside others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from gpuslice.checkpoint.format.nodes import ShardNode, TensorNode
from gpuslice.errors import RefusedSnapshotError

from . import plain_tensors
from .plain_tensors import LoadTensor
from .shards import Layout, is_distributed, layout_of, local_part
from .snapshot_tensors import Maker, Source

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_REMEDY = "restore on as many ranks, with the same parallel plan, as wrote the snapshot"


def load_shard(source: Source, node: ShardNode, live: Any, like: Any, path: str) -> LoadTensor:
    """A function that loads an entry into the live distributed tensor, or makes one beside another.

    Parameters
    ----------
    live
        What is there.
    like
        A distributed tensor of the same layout, whose mesh a new one is on.

    Raises
    ------
    RefusedSnapshotError
        If there is none, or it is laid out otherwise.
    """
    source.verify(node.local)
    if not is_distributed(like):
        raise RefusedSnapshotError(f"{path} is no distributed tensor here, but one was saved", _REMEDY)
    saved = node.shape, node.placements, node.mesh, node.coordinate
    if (here := layout_of(like)) != saved:
        raise RefusedSnapshotError(f"{path} is {_told(here)} here, but {_told(saved)} was saved", _REMEDY)
    grad = node.grad
    load_grad = None if grad is None else load_shard(source, grad, getattr(live, "grad", None), like, path)
    load_local = _in_place(source, node.local, live)

    def load(maker: Maker) -> torch.Tensor:
        if load_local is None:
            return _beside(maker.make(node.local, like.device), like).requires_grad_(node.requires_grad)
        load_local(maker)
        if live.is_leaf:
            live.requires_grad_(node.requires_grad)
            live.grad = None if load_grad is None else load_grad(maker)
        return cast("torch.Tensor", live)

    return load


def _in_place(source: Source, node: TensorNode, live: Any) -> LoadTensor | None:
    if not is_distributed(live) or not plain_tensors.alike(source.spec(node), local_part(live)):
        return None
    return plain_tensors.into(source, node, local_part(live))


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
