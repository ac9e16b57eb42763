"""Distributed tensors: a rank's part is saved and loaded bit for bit, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.named.state import check
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import RefusedSnapshotError

from ..named_state import reload, save


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, seed: int, *, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With gradients kept, if it has made steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def local(tensor: torch.Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.to_local().flatten().tolist()  # type: ignore[operator]


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    moments = [[local(state[key]) for key in ("exp_avg", "exp_avg_sq")] for state in optimizer.state.values()]
    return [(local(p), local(p.grad), p.requires_grad) for p in model.parameters()] + moments


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "trained"])
def test_a_sharded_model_and_its_optimizer_come_back(store: JobStore, mesh: DeviceMesh, steps: int) -> None:
    model, optimizer = sharded(mesh, 1, steps=2)
    next(model.parameters()).requires_grad_(False)
    other, its = sharded(mesh, 2, steps=steps)
    parameters = list(other.parameters())
    assert bits(other, its) != bits(model, optimizer)
    reload(store, {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": its})
    assert bits(other, its) == bits(model, optimizer)
    assert all(mine is before for mine, before in zip(other.parameters(), parameters, strict=True))
    other(torch.ones(4, 5)).sum().backward()  # and it goes on
    its.step()


def test_another_layout_is_refused_and_nothing_has_changed(store: JobStore, mesh: DeviceMesh) -> None:
    there = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    here = distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()])
    with open_snapshot(save(store, {"x": there}).path) as snapshot:
        with pytest.raises(
            RefusedSnapshotError, match=r"x is \[4, 2\], placed R on a mesh \[1\] at \[0\] here"
        ):
            check(snapshot, {"x": here})
        with pytest.raises(RefusedSnapshotError, match="x is no distributed tensor here"):
            check(snapshot, {"x": torch.zeros(4, 2)})
    assert local(here) == [0.0] * 8
    with (
        open_snapshot(save(store, {"x": torch.ones(4, 2)}).path) as snapshot,
        pytest.raises(RefusedSnapshotError, match="x has another layout"),
    ):
        check(snapshot, {"x": here})
