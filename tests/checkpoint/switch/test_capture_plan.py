"""What a suspend takes along: refusals by name, what stays, what a restart needs besides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuslice.checkpoint.format.layout import TensorSpec
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.block_plan import plan_blocks
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import Hold, Way
from gpuslice.types import Route

from ..harness import FaultyDevice, Job, SpyGate


class OnAnotherGpu(torch.UntypedStorage):
    """The host's memory, but it says that it is elsewhere."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


@pytest.mark.parametrize("route", [Route.TENSOR, Route.VMM])
def test_memory_on_a_further_device_is_refused_by_name(store: JobStore, route: Route) -> None:
    storage = OnAnotherGpu(4000)
    holder = {"second_half": torch.empty(0).set_(storage)}  # type: ignore[call-overload]
    device = FaultyDevice()
    shim: Any = object() if route is Route.VMM else None  # not even looked at
    switch = Switch(device, store, shim=shim)
    with pytest.raises(SuspendRefusedError, match=r"second_half .* is on cuda:1, .* device is cpu"):
        switch.suspend(boundary=1)
    assert "copy_out" not in device.calls
    assert holder


class Obstacle:
    """Something that forbids a suspend while it lives."""


def test_a_live_obstacle_is_refused(store: JobStore) -> None:
    device = FaultyDevice()
    device.obstacles = {Obstacle: "it is in the way"}
    switch = Switch(device, store)
    obstacle = Obstacle()
    with pytest.raises(SuspendRefusedError, match="Obstacle on cpu: it is in the way"):
        switch.suspend(boundary=1)
    del obstacle
    switch.suspend(boundary=1)
    switch.resume()


def test_numpy_memory_stays_if_somebody_could_read_it(store: JobStore, job: Job) -> None:
    before = job.array.copy()
    switch = Switch(FaultyDevice(), store, gate=SpyGate(alone=False))
    record = switch.suspend(boundary=1)
    assert np.array_equal(job.array, before)
    assert (
        record.resident["other code could read its memory meanwhile, as a NumPy array does"] >= before.nbytes
    )
    switch.resume()


def read(snapshot: SnapshotFile, spec: TensorSpec) -> list[Any]:
    dtype, content = getattr(torch, spec.dtype), bytearray(snapshot.view(spec.sid))
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    values: list[Any] = flat.as_strided(spec.shape, spec.stride, spec.offset).tolist()
    return values


def test_named_state_is_in_the_snapshot_for_another_process(store: JobStore, job: Job) -> None:
    shared = torch.arange(10).share_memory_()
    switch = Switch(FaultyDevice(), store)
    # Read before the suspend: a tensor of this test is suspended like every other.
    expected = {"model.0.weight": job.model[0].weight.tolist(), "shared": shared.tolist(), "empty": [[], []]}
    named = {"model": job.model, "shared": shared, "empty": torch.empty(2, 0)}
    record = switch.suspend(boundary=5, named=named, restartable=True)
    assert switch.snapshot is not None
    with open_snapshot(switch.snapshot.path) as snapshot:
        assert (snapshot.boundary, snapshot.restartable) == (5, True)
        specs = {tensor.path: tensor for tensor in snapshot.tensors}
        found = {path: read(snapshot, specs[path]) for path in expected}
    assert found == expected
    assert record.bytes_copied == record.bytes_freed + shared.nbytes
    switch.resume()


class FreesOnly(FaultyDevice):
    """Knows one way to empty storages, as GPUs do, and no other."""

    def holds(self, storages: Any, *, fixed: Any, exposed: Any) -> list[Hold]:
        holds = super().holds(storages, fixed=fixed, exposed=exposed)
        return [hold if hold.way is Way.FREED else Hold(Way.RESIDENT, "it stays") for hold in holds]

    def discard(self, storages: Any) -> None:
        raise AssertionError("it never said so")


def test_a_device_is_asked_to_empty_storages_only_in_ways_that_it_named(store: JobStore, job: Job) -> None:
    before = job.digest()
    switch = Switch(FreesOnly(), store, gate=SpyGate())
    switch.suspend(boundary=1)
    switch.resume()
    assert job.digest() == before


class NoBlocks:
    """A shim of a device on which nothing was ever allocated."""

    def blocks(self, device: int) -> list[Any]:
        return []


def test_the_vmm_route_leaves_workspaces_that_captured_graphs_know() -> None:
    asked: list[bool] = []

    class Spy(FaultyDevice):
        def release_caches(self, *, workspaces: bool = True) -> None:
            asked.append(workspaces)

    shim: Any = NoBlocks()
    plan_blocks(shim, Spy(), [], [])
    assert asked == [False]
