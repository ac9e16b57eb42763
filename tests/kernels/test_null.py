"""NullDevice: nothing moves."""

from __future__ import annotations

import torch

from gpuslice.kernels.null import NullDevice
from gpuslice.types import DeviceName


def storage(nbytes: int) -> torch.UntypedStorage:
    return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()


def test_nothing_moves() -> None:
    device, moved = NullDevice(DeviceName("null", 0)), storage(10)
    address = moved.data_ptr()
    device.free([moved])
    assert (moved.nbytes(), moved.data_ptr()) == (10, address)
