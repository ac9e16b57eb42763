"""Named state written to a snapshot and loaded into other objects, and how to compare the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gpuslice.checkpoint.format.layout import Layout, StorageSpec, TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.named.state import check, describe
from gpuslice.checkpoint.ramdisk.store import JobStore


def save(store: JobStore, named: Mapping[str, object], *, skip: str = "") -> SnapshotFile:
    """Write a snapshot of named state; the tensor whose path is ``skip`` is left out (a broken capture)."""
    state = describe(named)
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for _, t in state.tensors}
    sids = {key: sid for sid, key in enumerate(storages)}
    layout = Layout(tuple(StorageSpec(s.nbytes()) for s in storages.values()))
    with_bytes = {sids[t.untyped_storage()._cdata] for path, t in state.tensors if path != skip}
    writer = store.begin(layout)
    for key, storage in storages.items():
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        writer.view(sids[key])[:] = bytes(raw.tolist() if sids[key] in with_bytes else len(raw))
    specs = [
        TensorSpec(
            path,
            sids[t.untyped_storage()._cdata],
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
        )
        for path, t in state.tensors
    ]
    return writer.publish(state.tree, specs, boundary=1, restartable=True)


def reload(store: JobStore, saved: Mapping[str, object], live: Mapping[str, object]) -> dict[str, Any]:
    """Save one set of objects and load it into another, through the file."""
    with open_snapshot(save(store, saved).path) as snapshot:
        return check(snapshot, live).apply()


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(plain.view(torch.uint8).tolist())


class Net(nn.Module):
    """Tied weights, a frozen layer, buffers of both kinds, extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(seed == 0)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.calls = seed

    def get_extra_state(self) -> object:
        return {"calls": self.calls, "when": torch.tensor([self.calls])}

    def set_extra_state(self, state: Any) -> None:
        assert int(state["when"]) == state["calls"]
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.frozen(self.tied(self.first(x)))))


def module_bits(module: nn.Module) -> dict[str, object]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    found: dict[str, object] = {name: bits(tensor) for name, tensor in tensors}
    grads = {f"{name}.grad": None if t.grad is None else bits(t.grad) for name, t in tensors}
    flags = {f"{name}.training": part.training for name, part in module.named_modules()}
    return found | grads | flags | {f"{name}.needs": t.requires_grad for name, t in tensors}
