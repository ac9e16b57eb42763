"""What gpuslice does in threads of its own is no matter of a graph that the script is capturing meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from gpuslice.kernels import Device, open_device
from gpuslice.types import DeviceName

GPU = DeviceName.parse("cuda:0")


def beside_a_capture(work: Callable[[], object]) -> list[float]:
    """What a graph gives whose capture another thread's ``work`` came into."""
    state, failures = torch.ones(8, device="cuda:0"), []

    def labour() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            failures.append(error)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        thread = threading.Thread(target=labour)
        thread.start()
        thread.join()
        state.mul_(3)
    assert not failures, failures
    graph.replay()
    torch.cuda.synchronize()
    return state.tolist()


def page_lock(device: Device, storage: torch.UntypedStorage) -> None:
    arena = memoryview(bytearray(1 << 20))
    assert device.register(arena)
    device.unregister(arena)


def copy_there_and_back(device: Device, storage: torch.UntypedStorage) -> None:
    arena = memoryview(bytearray(storage.nbytes()))
    device.copy_out([(storage, 0)], arena)
    device.copy_in([(storage, 0)], arena)


@pytest.mark.parametrize("work", [page_lock, copy_there_and_back])
def test_a_capture_goes_on_beside_it(work: Callable[[Device, torch.UntypedStorage], None]) -> None:
    device = open_device(GPU)
    other = torch.arange(1 << 19, device="cuda:0")
    before = other.tolist()
    copy_there_and_back(device, other.untyped_storage())  # what is made once is made before
    assert beside_a_capture(lambda: work(device, other.untyped_storage())) == [3.0] * 8
    assert other.tolist() == before
