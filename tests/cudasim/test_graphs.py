"""Stream capture and graphs: what capturing forbids, and that a replay does it all again."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from threading import Thread

import cudasim
import pytest
import torch

from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

CUDA = torch.device("cuda:0")
UNSUPPORTED, INVALIDATED, UNJOINED = 900, 901, 904


def test_a_capture_does_nothing_and_a_replay_does_it() -> None:
    values = torch.arange(4.0, device=CUDA)
    counter = torch.zeros(1, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = values * 2
        counter.add_(1)
    assert counter.item() == 0
    for number in range(1, 4):
        values.fill_(number)
        graph.replay()
        assert (doubled.sum().item(), counter.item()) == (8 * number, number)


def test_a_replay_draws_new_random_numbers_and_the_generator_goes_on() -> None:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.manual_seed(7)
    with torch.cuda.graph(graph):
        drawn = torch.rand(8, device=CUDA)
    state = torch.cuda.get_rng_state(0)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)
    torch.cuda.set_rng_state(state, 0)
    graph.replay()
    assert torch.equal(first, drawn)


def test_whole_training_steps_as_a_graph() -> None:
    def train(*, graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(CUDA)
        optimizer = torch.optim.Adam(model.parameters(), capturable=True)
        batch = torch.randn(4, 6, device=CUDA)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(batch).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream(0)
        side.wait_stream(torch.cuda.current_stream(0))
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream(0).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                step()
        for number in range(3):
            batch.fill_(number / 7)
            if graphed:
                graph.replay()
            else:
                step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(graphed=True), train(graphed=False), strict=True))


def lock_pages() -> int:
    with mmap.mmap(-1, 4096) as mapping:
        view = (ctypes.c_char * 4096).from_buffer(mapping)
        address = ctypes.c_void_p(ctypes.addressof(view))
        code: int = cudasim.runtime().cudaHostRegister(address, ctypes.c_size_t(4096), 1)
        if code == 0:
            cudasim.runtime().cudaHostUnregister(address)
        del view
    return code


def allocate() -> int:
    code: int = cudasim.runtime().cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(8))
    return code


def synchronize() -> int:
    code: int = cudasim.runtime().cudaDeviceSynchronize()
    return code


def in_a_thread(question: Callable[[], int]) -> int:
    codes: list[int] = []
    thread = Thread(target=lambda: codes.append(question()))
    thread.start()
    thread.join()
    return codes[0]


@pytest.mark.parametrize("question", [lock_pages, allocate, synchronize])
@pytest.mark.parametrize("where", [lambda question: question(), in_a_thread], ids=["same", "other"])
def test_unsafe_calls_end_a_capture(
    where: Callable[[Callable[[], int]], int], question: Callable[[], int]
) -> None:
    stream = torch.cuda.Stream(0)
    values = torch.ones(4, device=CUDA)
    torch.cuda.synchronize()
    runtime, handle = cudasim.runtime(), ctypes.c_void_p(stream.cuda_stream)
    with torch.cuda.stream(stream):
        assert runtime.cudaStreamBeginCapture(handle, 0) == 0
        values.add_(1)
        assert where(question) == UNSUPPORTED
        graph = ctypes.c_void_p()
        assert runtime.cudaStreamEndCapture(handle, ctypes.byref(graph)) == INVALIDATED
        runtime.cudaGetLastError()
    assert values.sum().item() == 4


@pytest.mark.parametrize("joined", [True, False])
def test_work_on_a_side_stream_must_be_joined_before_a_capture_ends(joined: bool) -> None:
    stream, side = torch.cuda.Stream(0), torch.cuda.Stream(0)
    values = torch.ones(4, device=CUDA)
    torch.cuda.synchronize()
    runtime, handle, graph = cudasim.runtime(), ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    with torch.cuda.stream(stream):
        assert runtime.cudaStreamBeginCapture(handle, 0) == 0
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            values.mul_(3)
        if joined:
            stream.wait_stream(side)
        assert runtime.cudaStreamEndCapture(handle, ctypes.byref(graph)) == (0 if joined else UNJOINED)
        assert bool(graph.value) == joined
        runtime.cudaGetLastError()
    assert values.tolist() == [1.0] * 4
    assert torch.ones(4, device=CUDA).sum().item() == 4  # neither stream is captured any more


def test_a_thread_that_relaxes_its_mode_may_lock_pages_meanwhile() -> None:
    def relaxed() -> int:
        cudasim.runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))
        return lock_pages()

    values = torch.ones(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values.add_(1)
        assert in_a_thread(relaxed) == 0
    graph.replay()
    assert values.sum().item() == 8


def test_values_are_not_to_be_had_while_capturing() -> None:
    stream, values = torch.cuda.Stream(0), torch.ones(4, device=CUDA)
    torch.cuda.synchronize()
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    with torch.cuda.stream(stream):
        assert cudasim.runtime().cudaStreamBeginCapture(handle, 0) == 0
        with pytest.raises(torch.AcceleratorError, match="captur"):
            values.nonzero()
        assert cudasim.runtime().cudaStreamEndCapture(handle, ctypes.byref(graph)) == INVALIDATED
    cudasim.runtime().cudaGetLastError()


def test_an_arena_is_locked_in_a_thread_while_a_graph_is_captured() -> None:
    """As the next suspend's arena is made ready beside a training."""
    device = open_device(DeviceName("cuda", 0))
    values, graph = torch.ones(4, device=CUDA), torch.cuda.CUDAGraph()
    with mmap.mmap(-1, 1 << 20) as mapping:
        arena = memoryview(mapping)
        with torch.cuda.graph(graph):
            values.add_(1)
            assert in_a_thread(lambda: int(device.register(arena))) == 1
        graph.replay()
        device.unregister(arena)
        arena.release()
    assert values.sum().item() == 8
