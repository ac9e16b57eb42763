"""CudaDevice, where there is a GPU: memory really goes, failures leave nothing behind."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch

from gpuslice.errors import DeviceMemoryError, SuspendRefusedError
from gpuslice.kernels import Way
from gpuslice.kernels.cuda import allocator_memory
from gpuslice.kernels.cuda.device import CudaDevice, _streams_by_address
from gpuslice.kernels.transfer import Pairs
from gpuslice.types import DeviceName

from ..checksums import Remembered, checksum_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
MIB = 1 << 20


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(DeviceName("cuda", 0))


def test_freed_memory_leaves_the_allocator(device: CudaDevice) -> None:
    device.release_caches()  # what earlier tests of this process left there
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
    made_on = _streams_by_address(allocator_memory.segments([0]))
    assert made_on[storage.data_ptr()] == stream.cuda_stream


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
    (hold,) = device.holds([taken.untyped_storage()], fixed=frozenset())
    assert hold.way is Way.RESIDENT


#: Scalars, odd sizes, and large ones of several chunks and blocks.
SIZES = [4, 1000, 70_001, 4, 3 * MIB, 900 << 10, 20 * MIB + 3]
SMALL_BYTES = sum(size for size in SIZES if size < MIB)


Locked = tuple[list[torch.Tensor], Pairs, memoryview]


@pytest.fixture
def locked(device: CudaDevice) -> Iterator[Locked]:
    """Tensors of those sizes, their places in an arena, and the arena, page-locked."""
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda:0") for n in SIZES]
    offsets = list(accumulate((-(-n // 4096) * 4096 for n in SIZES), initial=0))
    with mmap.mmap(-1, offsets[-1]) as mapping:
        arena = memoryview(mapping)
        assert device.register(arena)
        device.synchronize()
        yield tensors, [(t.untyped_storage(), at) for t, at in zip(tensors, offsets, strict=False)], arena
        device.unregister(arena)
        arena.release()


def arrived(tensors: list[torch.Tensor], pairs: Pairs, arena: memoryview) -> bool:
    places = [at for _, at in pairs]
    return all(
        bytes(arena[at : at + tensor.numel()]) == bytes(tensor.cpu().numpy())
        for tensor, at in zip(tensors, places, strict=True)
    )


def test_small_storages_are_packed_and_come_back(device: CudaDevice, locked: Locked) -> None:
    pytest.importorskip("cupy")
    tensors, pairs, arena = locked
    before = [tensor.clone() for tensor in tensors]
    out = device.copy_out(pairs, arena)
    assert out.paths == {"packed": SMALL_BYTES, "direct": sum(SIZES) - SMALL_BYTES}
    assert (out.launches, out.fallbacks) == (1, ())
    assert arrived(tensors, pairs, arena)
    for tensor in tensors:
        tensor.zero_()
    device.synchronize()
    assert device.copy_in(pairs, arena.toreadonly()).paths == out.paths
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))


def test_only_changed_chunks_are_copied_again(device: CudaDevice, locked: Locked) -> None:
    pytest.importorskip("cupy")
    tensors, pairs, arena = locked
    checksums = Remembered(pairs)
    assert "unchanged" not in device.copy_out(pairs, arena, None, checksums).paths
    tensors[-1][5 * MIB] ^= 1
    device.synchronize()
    again = device.copy_out(pairs, arena, None, checksums)
    assert again.paths["direct"] == 4 * MIB
    assert again.paths["unchanged"] == sum(SIZES) - SMALL_BYTES - 4 * MIB
    assert arrived(tensors, pairs, arena)


def test_checksums_are_those_of_xxhash_both_ways(device: CudaDevice, locked: Locked) -> None:
    pytest.importorskip("cupy")
    tensors, pairs, arena = locked
    out, back = Remembered(pairs), Remembered(pairs)
    device.copy_out(pairs, arena, None, out)
    data, start = tensors[-1].cpu().numpy().tobytes(), pairs[-1][1]
    for at in range(0, len(data), 4 * MIB):
        assert out.sums[start + at] == checksum_reference(data[at : at + 4 * MIB])
    device.copy_in(pairs, arena, None, back)
    assert back.sums == out.sums


def test_without_kernels_everything_is_copied_and_it_is_said(
    device: CudaDevice, locked: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device._engines[0], "_missing", "the GPU kernels need CuPy")
    tensors, pairs, arena = locked
    out = device.copy_out(pairs, arena, None, Remembered(pairs))
    assert out.paths == {"direct": sum(SIZES)}
    assert len(out.fallbacks) == 2
    assert arrived(tensors, pairs, arena)


def test_an_arena_that_is_not_locked_works_and_is_reported(device: CudaDevice) -> None:
    storage = torch.arange(MIB, device="cuda:0").untyped_storage()
    arena = memoryview(bytearray(storage.nbytes()))
    device.synchronize()
    out = device.copy_out([(storage, 0)], arena)
    assert out.fallbacks == ("the arena is not page-locked: it was never asked for",)
    assert torch.equal(torch.frombuffer(arena, dtype=torch.int64), torch.arange(MIB))


def test_a_mapping_is_locked_once_whichever_device_object_asks(device: CudaDevice) -> None:
    with mmap.mmap(-1, MIB) as mapping:
        arena = memoryview(mapping)
        before = device.registrations
        assert device.register(arena)
        assert CudaDevice(DeviceName("cuda", 0)).register(arena)
        assert device.registrations == before + 1
        device.unregister(arena)
        arena.release()


def test_copies_come_after_what_the_caller_has_queued(device: CudaDevice, locked: Locked) -> None:
    """Without a synchronization in between: the lanes wait for the caller's stream."""
    tensors, pairs, arena = locked
    busy = torch.randn(1024, 1024, device="cuda:0")
    with torch.cuda.stream(torch.cuda.Stream(0)):
        for _ in range(100):
            busy = busy @ busy
        tensors[-1].fill_(77)
        device.copy_out(pairs, arena)
    assert bytes(arena[pairs[-1][1] :][: SIZES[-1]]) == bytes([77]) * SIZES[-1]
