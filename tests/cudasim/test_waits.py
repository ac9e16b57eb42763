"""A wait that is taken out of the product is seen as wrong bytes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from threading import Thread

import cudasim
import pytest
import torch

from gpuslice.kernels import open_device
from gpuslice.kernels.cuda import engine
from gpuslice.kernels.cuda.engine import CudaEngine, CudaLane
from gpuslice.types import DeviceName

MIB = 1 << 20
NBYTES = 9 * MIB


@pytest.fixture
def arena() -> Iterator[memoryview]:
    """Page-locked, so that copies are asynchronous."""
    torch.cuda.init()  # nothing is page-locked for a process that has not begun to use the GPU
    device = open_device(DeviceName("cuda", 0))
    with mmap.mmap(-1, NBYTES) as mapping:
        view = memoryview(mapping)
        assert device.register(view)
        yield view
        device.unregister(view)
        view.release()


def copied_out(arena: memoryview, *, release: Callable[[], object]) -> int:
    """How many bytes of a tensor were copied out as they are, though it was filled just before."""
    device = open_device(DeviceName("cuda", 0))
    tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    handle = torch.cuda.current_stream(0).cuda_stream
    with cudasim.held(handle):
        tensor.fill_(7)
        thread = Thread(target=device.copy_out, args=([(tensor.untyped_storage(), 0)], arena))
        thread.start()
        release()
        thread.join(0 if release is torch.cuda.current_device else None)
    thread.join()
    return bytes(arena).count(7)


def lanes_without_waiting(self: CudaEngine) -> Sequence[CudaLane]:
    if not self._streams:
        self._streams = [torch.cuda.Stream(self._index) for _ in range(engine._LANES)]
    return [CudaLane(stream, self) for stream in self._streams]


def test_copies_come_after_the_jobs_own_work(arena: memoryview) -> None:
    assert copied_out(arena, release=torch.cuda.current_device) == NBYTES


def test_without_the_wait_for_the_jobs_stream_bytes_are_stale(
    arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaEngine, "lanes", lanes_without_waiting)
    assert copied_out(arena, release=lambda: None) == 0


def arrived(arena: memoryview) -> int:
    """How many bytes are in the arena when `copy_out` says that all are."""
    device = open_device(DeviceName("cuda", 0))
    tensor = torch.full((NBYTES,), 7, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    device.copy_out([(tensor.untyped_storage(), 0)], arena)
    count = bytes(arena).count(7)
    torch.cuda.synchronize()
    return count


def test_copies_have_arrived_when_they_are_said_to_have(arena: memoryview) -> None:
    assert arrived(arena) == NBYTES


def test_without_the_wait_for_arrivals_bytes_are_missing(
    arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[int] = []

    def nobody_waits(self: CudaLane) -> None:
        streams.append(self._stream.cuda_stream)

    monkeypatch.setattr(CudaLane, "wait", nobody_waits)
    monkeypatch.setattr(CudaLane, "record_event", lambda self: lambda: None)
    lanes = CudaEngine.lanes

    def held_lanes(self: CudaEngine) -> Sequence[object]:
        found = lanes(self)
        for lane in found:
            assert isinstance(lane, CudaLane)
            cudasim.runtime().cudasim_hold(cudasim.ctypes.c_void_p(lane._stream.cuda_stream), 1)
        return found

    monkeypatch.setattr(CudaEngine, "lanes", held_lanes)
    device = open_device(DeviceName("cuda", 0))
    tensor = torch.full((NBYTES,), 7, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    device.copy_out([(tensor.untyped_storage(), 0)], arena)
    missing = NBYTES - bytes(arena).count(7)
    for handle in streams:
        cudasim.runtime().cudasim_hold(cudasim.ctypes.c_void_p(handle), 0)
    torch.cuda.synchronize()
    assert missing == NBYTES
