"""NullDevice: nothing moves, memory is bookkeeping."""

from __future__ import annotations

import pytest
import torch

from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels.null import NullDevice
from gpuslice.types import DeviceName


def storage(nbytes: int) -> torch.UntypedStorage:
    return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()


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
