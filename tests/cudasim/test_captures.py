"""What gpuslice does in threads of its own is no matter of a graph that the script is capturing meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from gpuslice.kernels import Device, open_device
from gpuslice.kernels.cuda.copy_plan import BLOCK_BYTES
from gpuslice.types import DeviceName

from ..patience import PATIENCE_S

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


def copy_and_inspect(device: Device, storage: torch.UntypedStorage) -> None:
    """Two blocks, by two threads: each waits for its block, and then for the other thread."""
    both = threading.Barrier(2)
    device.copy_out([(storage, 0)], memoryview(bytearray(storage.nbytes())), lambda *_: both.wait(PATIENCE_S))


@pytest.mark.parametrize("work", [page_lock, copy_there_and_back, copy_and_inspect])
def test_a_capture_goes_on_beside_it(
    work: Callable[[Device, torch.UntypedStorage], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuslice.kernels.cuda.device._threads", lambda: 2)
    device = open_device(GPU)
    other = torch.arange(2 * BLOCK_BYTES // 8, device="cuda:0")
    before = other.cpu()
    copy_there_and_back(device, other.untyped_storage())  # what is made once is made before
    assert beside_a_capture(lambda: work(device, other.untyped_storage())) == [3.0] * 8
    assert other.cpu().equal(before)
