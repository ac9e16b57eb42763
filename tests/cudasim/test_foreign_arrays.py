"""Arrays of other libraries over tensors' memory: what they know the address of stays where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy
import pytest
import torch

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import SuspendRefusedError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

MIB = 1 << 20
REASON = "another library knows its address"


@pytest.fixture
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switch]:
    with RamDisk(tmp_path_factory.mktemp("foreign") / "ramdisk", 256 * MIB).open_store(None) as store:
        yield Switch(open_device(DeviceName("cuda", 0)), store)


def overwrite_what_is_free() -> None:
    torch.full((64 * MIB,), 255, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()


def test_an_array_over_a_tensor_sees_it_after_a_switch(switch: Switch) -> None:
    other = torch.ones(4 * MIB, device="cuda:0")
    tensor = torch.arange(2 * MIB, device="cuda:0")
    array = cupy.asarray(tensor[5:1000])
    record = switch.suspend(boundary=1)
    overwrite_what_is_free()
    switch.resume()
    assert record.resident == {REASON: tensor.nbytes}
    assert record.bytes_freed >= other.nbytes
    assert array.get().tolist() == list(range(5, 1000))
    tensor.add_(1)
    torch.cuda.synchronize()
    assert array.get().tolist() == list(range(6, 1001))


def test_an_array_that_is_gone_holds_nothing(switch: Switch) -> None:
    tensor = torch.ones(MIB, device="cuda:0")
    array = cupy.asarray(tensor)
    assert switch.suspend(boundary=1).resident
    switch.resume()
    del array
    assert not switch.suspend(boundary=2).resident
    switch.resume()
    assert tensor.sum().item() == MIB


@pytest.mark.two_gpus
def test_what_an_array_knows_the_address_of_does_not_move(switch: Switch) -> None:
    tensor = torch.ones(MIB, device="cuda:0")
    array = cupy.asarray(tensor)
    switch.suspend(boundary=1)
    assert REASON in switch.obstacle_to_moves()
    with pytest.raises(SuspendRefusedError, match=REASON):
        switch.resume(open_device(DeviceName("cuda", 1)))
    switch.resume()
    assert array.get().sum() == MIB


class HostArray:
    """As JAX's arrays that are on the host: the interface is there, and cannot be had."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("not on a GPU")


def test_an_array_that_is_not_on_a_gpu_is_no_matter(switch: Switch) -> None:
    tensor, array = torch.ones(MIB, device="cuda:0"), HostArray()
    assert not switch.suspend(boundary=1).resident
    switch.resume()
    assert tensor.sum().item() == MIB
    del array
