"""Snapshots that are taken back without comparing their bytes: what is believed then, and what never is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.state import OWN_PREFIX, check
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import CorruptSnapshotError, RefusedSnapshotError
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

from .harness import flip_a_bit
from .named_state import save


def place_of(snapshot: SnapshotFile, path: str) -> int:
    """Where the bytes of a tensor's storage begin."""
    return snapshot.offsets[next(spec.sid for spec in snapshot.tensors if spec.path == path)]


@pytest.mark.parametrize("live", ["there", "new"])
def test_every_damaged_byte_arrives(store: JobStore, monkeypatch: pytest.MonkeyPatch, live: str) -> None:
    """Into live tensors and into new ones, of one chunk and of two."""
    saved = {"small": torch.zeros(100), "large": torch.zeros(1_200_000), "array": np.zeros(9)}
    snapshot = save(store, {"state": saved})
    for start, _ in snapshot.content.placement.chunks:
        flip_a_bit(snapshot.path, start + 3)
    monkeypatch.setattr(SnapshotFile, "verify", None)  # nor does anybody look
    with open_snapshot(snapshot.path) as damaged:
        here = {name: value.copy() if name == "array" else value + 7 for name, value in saved.items()}
        loaded = check(damaged, {"state": here if live == "there" else {}}, verify=False).apply()["state"]
    wrong = {
        name: np.flatnonzero(np.asarray(value).view(np.uint8)).tolist() for name, value in loaded.items()
    }
    assert wrong == {"small": [3], "large": [3, 4 * 2**20 + 3], "array": [3]}


@pytest.mark.parametrize("verify", [True, False])
def test_a_resume_says_whether_it_compared(store: JobStore, verify: bool) -> None:
    tensor = torch.zeros(300_000)
    switch = Switch(CpuDevice(DeviceName("cpu", None)), store, verify=verify)
    switch.suspend(boundary=1, named={"tensor": tensor})
    if not verify:
        assert switch.snapshot is not None
        flip_a_bit(switch.snapshot.path, place_of(switch.snapshot, "tensor") + 41)
    assert switch.resume().verified is verify
    assert np.flatnonzero(tensor.numpy().view(np.uint8)).tolist() == ([] if verify else [41])


def generators() -> dict[str, Callable[[], object]]:
    return {
        "torch": lambda: torch.Generator().manual_seed(5),
        "numpy": lambda: np.random.Generator(np.random.MT19937(5)),
        f"{OWN_PREFIX}rng": process_rng.capture,
    }


@pytest.mark.parametrize("name", generators())
def test_random_states_are_compared_all_the_same(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With others than it wrote itself, torch draws from beyond them."""
    monkeypatch.setattr(SnapshotFile, "verify", None)  # nobody looks at all the rest for their sake
    make = generators()[name]
    snapshot = save(store, {"weight": torch.ones(5), name: make()})
    paths = [spec.path for spec in snapshot.tensors if spec.path != "weight"]
    assert paths
    flip_a_bit(snapshot.path, place_of(snapshot, "weight"))
    for path in paths:
        flip_a_bit(snapshot.path, place_of(snapshot, path) + 8)
        live = {"weight": torch.zeros(5), name: make()}
        with open_snapshot(snapshot.path) as damaged, pytest.raises(CorruptSnapshotError, match="is damaged"):
            check(damaged, live, verify=False)
        flip_a_bit(snapshot.path, place_of(snapshot, path) + 8)
    with open_snapshot(snapshot.path) as damaged:
        check(damaged, {"weight": torch.zeros(5), name: make()}, verify=False).apply()


def test_a_sparse_tensor_of_impossible_indices_is_refused_all_the_same(store: JobStore) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (2,), check_invariants=True)
    snapshot = save(store, {"sparse": [sparse.coalesce()]})
    flip_a_bit(snapshot.path, snapshot.offsets[0] + 1)  # the first index becomes 256
    with open_snapshot(snapshot.path) as damaged, pytest.raises(RefusedSnapshotError, match="is no tensor"):
        check(damaged, {"sparse": []}, verify=False)
