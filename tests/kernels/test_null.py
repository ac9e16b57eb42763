"""NullDevice: time from the cost model, memory from the bookkeeping."""

from __future__ import annotations

import pytest
import torch

from gpuslice.clock import VirtualClock
from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels.null import NullCost, NullDevice
from gpuslice.types import DeviceName


def storage(nbytes: int) -> torch.UntypedStorage:
    return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()


def test_copies_take_the_time_of_the_cost_model() -> None:
    clock = VirtualClock()
    cost = NullCost(fixed_s=1.0, out_bytes_per_s=100.0, in_bytes_per_s=50.0)
    device = NullDevice(
        DeviceName("null", 0), cost=cost, wait=lambda seconds: clock.advance_to(clock.now() + seconds)
    )
    moved = storage(200)
    view = memoryview(bytearray(200))
    device.copy_out([(moved, 0)], view)
    assert clock.now() == 3.0
    device.copy_in([(moved, 0)], view)
    assert clock.now() == 8.0


def test_nothing_moves() -> None:
    device, moved = NullDevice(DeviceName("null", 0)), storage(10)
    address = moved.data_ptr()
    device.free([moved])
    assert (moved.nbytes(), moved.data_ptr()) == (10, address)


def test_reserving_beyond_the_capacity_changes_nothing() -> None:
    device, moved = NullDevice(DeviceName("null", 0), total_bytes=100), storage(80)
    device.free([moved])
    device.allocate([50])
    with pytest.raises(DeviceMemoryError, match="80 are needed"):
        device.reserve([(moved, 80)])
    assert device.memory().used_bytes == 50


def test_what_is_free_is_not_freed_again() -> None:
    device, moved = NullDevice(DeviceName("null", 0), total_bytes=100), storage(40)
    device.allocate([40, 40])
    device.free([moved])
    device.free([moved])
    assert device.memory().used_bytes == 40
