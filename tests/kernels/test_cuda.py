"""CudaDevice, where there is a GPU: memory really goes, failures leave nothing behind."""

from __future__ import annotations

import mmap

import pytest
import torch

from gpuslice.errors import DeviceMemoryError, SuspendRefusedError
from gpuslice.kernels import Way
from gpuslice.kernels.cuda import CudaDevice
from gpuslice.types import DeviceName

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
MIB = 1 << 20


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(DeviceName("cuda", 0))


def test_freed_memory_leaves_the_allocator(device: CudaDevice) -> None:
    tensors = [torch.ones(8 * MIB, device="cuda:0") for _ in range(8)]
    before = device.memory()
    device.free([tensor.untyped_storage() for tensor in tensors])
    device.release_caches()
    after = device.memory()
    assert before.allocated_bytes is not None
    assert after.allocated_bytes is not None
    assert before.allocated_bytes - after.allocated_bytes == 8 * 32 * MIB
    assert before.reserved_bytes - after.reserved_bytes >= 8 * 32 * MIB


def test_copies_through_page_locked_memory_are_exact(device: CudaDevice) -> None:
    tensor = torch.arange(MIB, device="cuda:0")
    storage = tensor.untyped_storage()
    with mmap.mmap(-1, storage.nbytes()) as mapping:
        arena = memoryview(mapping)
        assert device.register(arena)
        assert device.register(arena)
        device.synchronize()
        device.copy_out([(storage, 0)], arena)
        tensor.zero_()
        device.synchronize()
        device.copy_in([(storage, 0)], arena.toreadonly())
        device.unregister(arena)
        arena.release()
    assert torch.equal(tensor.cpu(), torch.arange(MIB))


def test_out_of_memory_gives_back_what_was_reserved(device: CudaDevice) -> None:
    small, huge = (torch.ones(MIB, device="cuda:0").untyped_storage() for _ in range(2))
    device.free([small, huge])
    with pytest.raises(DeviceMemoryError, match="cuda:0 has"):
        device.reserve([(small, 4 * MIB), (huge, 2 * device.memory().total_bytes)])
    assert (small.nbytes(), huge.nbytes()) == (0, 0)
    device.reserve([(small, 4 * MIB), (huge, 4 * MIB)])
    assert (small.nbytes(), huge.nbytes()) == (4 * MIB, 4 * MIB)


def test_a_storage_comes_back_on_the_stream_it_was_made_on(device: CudaDevice) -> None:
    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        storage = torch.ones(8 * MIB, device="cuda:0").untyped_storage()
    device.synchronize()
    device.free([storage])
    device.release_caches()
    device.reserve([(storage, 32 * MIB)])
    assert device._streams_by_address()[storage.data_ptr()] == stream.cuda_stream


def test_a_capture_cannot_be_interrupted(device: CudaDevice) -> None:
    values = torch.ones(10, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    device.check_idle()
    with torch.cuda.graph(graph):
        values.mul_(2)
        with pytest.raises(SuspendRefusedError, match="capturing"):
            device.check_idle()
    assert type(graph) in device.obstacles


def test_memory_of_another_library_stays(device: CudaDevice) -> None:
    taken = torch.from_dlpack(torch.ones(10, device="cuda:0"))
    (hold,) = device.holds([taken.untyped_storage()], fixed=frozenset(), alone=True)
    assert hold.way is Way.RESIDENT
