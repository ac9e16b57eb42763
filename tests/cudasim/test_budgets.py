"""What a suspend and a resume ask of CUDA, in numbers of calls and bytes."""

from __future__ import annotations

from collections.abc import Iterator

import cudasim
import cudasim_tally
import pytest
import torch

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

from ..gpuslice.conftest import Workshop

MIB = 1 << 20
#: Calls that take time on a GPU or let the host wait for it.
COSTLY = (
    *("cudaMalloc", "cudaFree", "cudaHostRegister", "cudaHostUnregister", "cudaHostAlloc"),
    *("cudaMemcpyAsync", "cudaMemsetAsync", "cudaLaunchKernel", "cuLaunchKernel"),
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    *("cudaStreamCreateWithPriority", "cudaEventCreateWithFlags"),
)
#: At most, for a warm suspend of small storages, however many, and for its resume.
SUSPEND_BUDGET = {
    "cuLaunchKernel": 2,
    "cudaLaunchKernel": 2,
    "cudaMemcpyAsync": 4,
    "cudaMalloc": 1,
    "cudaDeviceSynchronize": 1,
    "cudaStreamSynchronize": 3,
    "cudaEventSynchronize": 0,
    "cudaEventCreateWithFlags": 3,
}
RESUME_BUDGET = {
    "cuLaunchKernel": 2,
    "cudaLaunchKernel": 2,
    "cudaMemcpyAsync": 4,
    "cudaMalloc": 2,
    "cudaDeviceSynchronize": 0,
    "cudaStreamSynchronize": 3,
    "cudaEventCreateWithFlags": 4,
}


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobStore]:
    with RamDisk(tmp_path_factory.mktemp("budgets") / "ramdisk", 1 << 30).open_store(None) as opened:
        yield opened


def warm_round(store: JobStore, number: int, nbytes: int) -> tuple[dict[str, int], dict[str, int]]:
    """The costly calls of the third suspend and resume of so many storages."""
    torch.cuda.empty_cache()
    tensors = [
        torch.full((nbytes,), index % 251, dtype=torch.uint8, device="cuda:0") for index in range(number)
    ]
    switch = Switch(open_device(DeviceName("cuda", 0)), store)
    for _ in range(3):
        for tensor in tensors:
            tensor.add_(1)
        torch.cuda.synchronize()
        with cudasim.counting() as out:
            switch.suspend(boundary=1)
        with cudasim.counting() as back:
            switch.resume()
    assert all(tensor[0].item() == (index % 251 + 3) % 256 for index, tensor in enumerate(tensors))
    return out, back


def costly(counts: dict[str, int]) -> dict[str, int]:
    return {name: counts[name] for name in COSTLY if name in counts}


def test_calls_do_not_grow_with_the_number_of_small_tensors(store: JobStore) -> None:
    (few_out, few_back), (many_out, many_back) = (warm_round(store, n, 1000) for n in (20, 1500))
    # Where the allocator's small segments are full, it takes another one, and gives it back.
    segments = 1500 * 1024 // (2 * MIB) + 1
    for many, few in ((many_out, few_out), (many_back, few_back)):
        for name in ("cudaMalloc", "cudaFree"):
            assert many.pop(name, 0) <= few.pop(name, 0) + segments, name
        assert costly(many) == costly(few)


def test_a_switch_keeps_to_its_budget(store: JobStore) -> None:
    out, back = warm_round(store, 200, 1000)
    for counts, budget in ((out, SUSPEND_BUDGET), (back, RESUME_BUDGET)):
        what = "suspend" if counts is out else "resume"
        for name, allowed in budget.items():
            cudasim_tally.tell("budget", what, name, counts.get(name, 0), allowed)
        assert {name: n for name, n in counts.items() if n > budget.get(name, n)} == {}


def test_no_byte_is_copied_twice(store: JobStore) -> None:
    out, back = warm_round(store, 3, 8 * MIB)
    assert 24 * MIB <= out["d2h_bytes"] < 25 * MIB
    assert 24 * MIB <= back["h2d_bytes"] < 25 * MIB
    assert out.get("h2d_bytes", 0) < MIB
    assert back.get("d2h_bytes", 0) < MIB


FIRST = """
import cudasim, gpuslice, torch
state = [torch.ones(1000 + k, device="cuda:0") for k in range(50)]
job = gpuslice.attach(state=state)
before = cudasim.counts()
job.suspend()
print(cudasim.since(before).get("cudaStreamCreateWithPriority", 0))
job.resume()
"""


def test_a_first_suspend_makes_two_streams_and_no_pool_of_them(warm_workshop: Workshop) -> None:
    done = warm_workshop.gpuslice_run("--device", "cuda:0", str(warm_workshop.write("train.py", FIRST)))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_what_has_not_changed_is_not_copied(store: JobStore) -> None:
    tensor = torch.arange(16 * MIB, dtype=torch.uint8, device="cuda:0")
    switch = Switch(open_device(DeviceName("cuda", 0)), store)
    for _ in range(3):
        with cudasim.counting() as out:
            switch.suspend(boundary=1)
        switch.resume()
        tensor[5 * MIB] = 7
        torch.cuda.synchronize()
    assert out["d2h_bytes"] < 5 * MIB, "one chunk of four"


def test_arenas_are_locked_once(store: JobStore) -> None:
    tensor = torch.ones(8 * MIB, device="cuda:0")
    switch = Switch(open_device(DeviceName("cuda", 0)), store)
    for _ in range(3):
        switch.suspend(boundary=1)
        switch.resume()
    with cudasim.counting() as counts:
        switch.suspend(boundary=1)
        switch.resume()
    assert not {"cudaHostRegister", "cudaHostUnregister"} & counts.keys()
    assert tensor.sum().item() == 8 * MIB
