"""What must survive a suspend, bit for bit, on the simulated device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import cudasim
import pytest
import torch

from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import Device, open_device
from gpuslice.types import DeviceName

from ..checkpoint.cases import frameworks, loops, optimizers, places, tensors
from ..checkpoint.cases.registry import CASES, Loop
from ..checkpoint.harness import digest, seed
from . import cases
from .conftest import ON_A_GPU

MODULES = (frameworks, loops, optimizers, places, tensors)
#: What PyTorch says of its own code, and of what is rare; and Python of a loader with workers.
_SAID = (
    *("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*use of fork:DeprecationWarning"),
    *("ignore:ComplexHalf support", "ignore:Sparse ... tensor support", "ignore:TensorFloat32 tensor cores"),
)
pytestmark = [pytest.mark.filterwarnings(said) for said in _SAID]
NOT_DENSE = "only dense results are simulated"
CPU_GENERATOR = "draws with a generator of the host, which a GPU refuses"
#: Its dropout is cuDNN's, which PyTorch begins anew whenever it sets the state of the GPU's generator.
RECURRENT = "recurrent_state"
#: Cases of the host's matrix that the simulation cannot run, and those that a GPU cannot.
_BY_PLACE = (
    {"generators": CPU_GENERATOR, "loader": CPU_GENERATOR}
    if ON_A_GPU
    else {
        "compiled-inductor": "generates kernels of its own",
        "dtypes": "PyTorch warns of complex half floats",
        "quantized": NOT_DENSE,
        **{f"sparse-{layout}": NOT_DENSE for layout in ("bsc", "bsr", "coo", "csc", "csr")},
        "sparse_adam": NOT_DENSE,
        "sparse_gradients": NOT_DENSE,
    }
)
#: Those, and cases that say nothing about a GPU, or that run otherwise there.
ELSEWHERE = {
    "adagrad-fused": "PyTorch has it for the CPU only",
    "compiled-eager": "below, with all tensors on the device",
    "compiled-aot_eager": "below, with all tensors on the device",
    "loader_with_persistent_workers": "below; a worker makes no tensors on a GPU",
    "loader_with_workers": "below; a worker makes no tensors on a GPU",
    "memory_given_to_others": "the host's memory",
    "memory_of_numpy": "the host's memory",
    "sharded_parameters": "needs a mesh of GPUs and NCCL",
    **_BY_PLACE,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobStore]:
    with RamDisk(tmp_path_factory.mktemp("matrix") / "ramdisk", 1 << 30).open_store(None) as opened:
        yield opened


def generators() -> dict[str, object]:
    """The states that belong to a job on the first GPU."""
    return {**process_rng.capture(), "cuda": torch.cuda.get_rng_state(0)}


def run(loop: Loop, park: Callable[[int], object] | None = None) -> list[str]:
    """The digests at each boundary; ``park`` suspends and resumes there."""
    seed(11)
    torch.cuda.manual_seed_all(11)
    digests = []
    for boundary, state in enumerate(loop, start=1):
        digests.append(digest(generators(), *state))
        if park is not None:
            park(boundary)
            assert digest(generators(), *state) == digests[-1], "while parked"
    return digests


def parking(device: Device, store: JobStore, *, others_draw: bool = True) -> Callable[[int], object]:
    """Suspends and resumes; meanwhile others draw from the process's generators, the GPU's included."""
    switch = Switch(device, store)

    def park(boundary: int) -> None:
        record = switch.suspend(boundary=boundary)
        assert record.bytes_freed > 0
        torch.randn(8, device="cpu")
        if others_draw:
            torch.randn(8, device=device.torch_device)
        switch.resume()

    return park


@pytest.mark.parametrize("name", sorted(CASES.keys() - ELSEWHERE.keys()))
def test_survives(name: str, store: JobStore) -> None:
    device = open_device(DeviceName("cuda", 0))
    with torch.device(device.torch_device):
        expected = run(CASES[name]())
        park = parking(device, store, others_draw=name != RECURRENT)
        assert run(CASES[name](), park) == expected


def test_what_is_left_out_exists() -> None:
    assert ELSEWHERE.keys() <= CASES.keys()


@pytest.mark.parametrize("name", sorted(cases.CASES))
def test_a_gpus_script_survives(name: str, store: JobStore) -> None:
    device = open_device(DeviceName("cuda", 0))
    expected = run(cases.CASES[name](device.torch_device))
    assert len(expected) >= cases.BOUNDARIES
    park = parking(device, store, others_draw=name != RECURRENT)
    assert run(cases.CASES[name](device.torch_device), park) == expected


def test_a_recorded_graph_is_refused_by_name(store: JobStore) -> None:
    from gpuslice.errors import SuspendRefusedError

    values, graph = torch.ones(4, device="cuda:0"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values.add_(1)
    with pytest.raises(SuspendRefusedError, match="CUDA graph"):
        Switch(open_device(DeviceName("cuda", 0)), store).suspend(boundary=1)
    graph.replay()
    assert values.sum().item() == 8


@pytest.mark.two_gpus
@pytest.mark.parametrize("name", ["pinned_loader", "mixed_precision", "recurrent_state", "shared_storages"])
def test_moves_to_another_gpu_and_back(name: str, store: JobStore) -> None:
    """The loop's own tensors move with it; batches that it makes by ``device=`` stay where they were made."""
    gc.collect()  # another test's graph, which somebody could still go backward through, would be refused
    here, there = (open_device(DeviceName("cuda", index)) for index in (0, 1))
    expected = run(cases.CASES[name](here.torch_device))
    switch = Switch(here, store)

    def park(boundary: int) -> None:
        switch.suspend(boundary=boundary)
        switch.resume(there)
        left, _ = torch.cuda.mem_get_info(1)
        switch.suspend(boundary=boundary)
        switch.resume(here)
        assert torch.cuda.mem_get_info(1)[0] >= left

    assert run(cases.CASES[name](here.torch_device), park) == expected


@pytest.mark.whole_gpu
def test_a_parked_job_leaves_its_gpu_to_others(store: JobStore) -> None:
    device = open_device(DeviceName("cuda", 0))
    kept = torch.ones(64 << 20, dtype=torch.uint8, device=device.torch_device)
    switch = Switch(device, store)
    before = cudasim.used_bytes(0)
    switch.suspend(boundary=1)
    assert before - cudasim.used_bytes(0) >= 64 << 20
    switch.resume()
    assert kept.sum().item() == 64 << 20
