"""The memory shim under a fake CUDA driver and runtime in C: its logic is real, the GPU is not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels import compiler
from gpuslice.kernels.vmm import shim

from ...fakes.build import SHIM_PREAMBLE, python
from ...patience import PATIENCE_S

Scenario = Callable[..., None]


@pytest.fixture
def scenario(cuda_libraries: Path, shim_cache: Path) -> Scenario:
    def run(code: str, **environ: str) -> None:
        done = python(SHIM_PREAMBLE + code, cuda_libraries, XDG_CACHE_HOME=str(shim_cache), **environ)
        assert done.returncode == 0, done.stderr

    return run


def test_a_versioned_call_of_another_library_ends_in_the_shim(scenario: Scenario) -> None:
    scenario("""
address = take(3 * MIB, 7)
[block] = shim.blocks(0)
assert (block.address, block.nbytes, block.mapped) == (address, 3 * MIB, True)
assert cuda.fake_live_bytes(0) == 4 * MIB, "whole granules"
assert runtime.fake_runtime_allocations() == 0
assert give(address) == 0
assert shim.blocks(0) == [] and cuda.fake_live_handles() == cuda.fake_live_ranges() == 0
""")


def test_small_and_foreign_memory_is_left_to_the_runtime(scenario: Scenario) -> None:
    scenario("""
small = take(1000)
assert shim.blocks(0) == [] and runtime.fake_runtime_allocations() == 1
assert give(small) == 0 and runtime.fake_runtime_allocations() == 0
assert take(0) is None and give(None) == 0
""")


def test_without_virtual_memory_everything_is_left_to_the_runtime(scenario: Scenario) -> None:
    scenario("take(2 * MIB); assert runtime.fake_runtime_allocations() == 1", FAKE_CUDA_NO_VMM="1")


def test_addresses_survive_while_the_memory_is_gone(scenario: Scenario) -> None:
    scenario("""
addresses = [take((2 + 3 * i) * MIB + i, 10 + i) for i in range(5)]
before = shim.blocks(0)
shim.release(0)
assert cuda.fake_live_bytes(0) == cuda.fake_live_handles() == 0
assert cuda.fake_live_ranges() == 5, "the addresses stay reserved"
assert not any(block.mapped for block in shim.blocks(0))
shim.reserve(0)
assert shim.blocks(0) == before
for i, address in enumerate(addresses):
    nbytes = (2 + 3 * i) * MIB + i
    assert bytes_at(address, nbytes) == bytes(nbytes), "new memory, of the same length"
assert [give(address) for address in addresses] == [0] * 5
assert cuda.fake_live_handles() == cuda.fake_live_ranges() == 0
""")


def test_devices_are_emptied_one_by_one(scenario: Scenario) -> None:
    scenario("""
take(2 * MIB, 1, device=0)
other = take(4 * MIB, 2, device=1)
assert [block.device for block in shim.blocks(1)] == [1]
shim.release(0)
assert cuda.fake_live_bytes(0) == 0 and cuda.fake_live_bytes(1) == 4 * MIB
assert bytes_at(other, 4 * MIB) == bytes([2]) * 4 * MIB
shim.reserve(1)
assert cuda.fake_live_bytes(0) == 0
assert cuda.fake_context_depth() == 1, "the caller's context is what it was"
""")


def test_blocks_are_for_the_devices_that_were_enabled_to_use_them(scenario: Scenario) -> None:
    """Enabling peers counts for what cudaMalloc gives; memory that is mapped has its own list of users."""
    scenario("""
take(2 * MIB, 1, device=1)
assert cuda.fake_last_access() == 0b10
runtime.cudaSetDevice(0)
assert consumer.enable(1) == 0
assert cuda.fake_last_access() == 0b11, "a block that was there"
take(2 * MIB, 2, device=1)
assert cuda.fake_last_access() == 0b11, "a later one"
shim.release(1)
shim.reserve(1)
assert cuda.fake_last_access() == 0b11, "one that is back"
take(2 * MIB, 3, device=0)
assert cuda.fake_last_access() == 0b01, "access goes one way"
assert consumer.enable(1) == 704
""")


def test_a_suspended_block_can_be_freed(scenario: Scenario) -> None:
    scenario("""
first, second = take(2 * MIB), take(2 * MIB)
shim.release(0)
assert give(first) == 0
shim.reserve(0)
assert [block.address for block in shim.blocks(0)] == [second]
assert cuda.fake_live_handles() == cuda.fake_live_ranges() == 1
""")


def test_out_of_memory_at_resume_takes_nothing_and_can_be_tried_again(scenario: Scenario) -> None:
    scenario("""
addresses = [take(2 * MIB, i + 1) for i in range(4)]
shim.release(0)
os.environ["FAKE_CUDA_BYTES"] = str(5 * MIB)
try:
    shim.reserve(0)
except DeviceMemoryError as error:
    assert "CUDA error 2" in error.message, error.message
else:
    raise AssertionError("5 MiB are enough for 8")
assert cuda.fake_live_handles() == 0 and not any(block.mapped for block in shim.blocks(0))
del os.environ["FAKE_CUDA_BYTES"]
shim.reserve(0)
assert [block.address for block in shim.blocks(0) if block.mapped] == sorted(addresses)
""")


def test_what_failed_is_said_to_the_thread_that_saw_it(scenario: Scenario) -> None:
    scenario("""
import threading
take(4 * MIB)
shim.release(0)
os.environ["FAKE_CUDA_BYTES"] = str(MIB)
said = []
def resume():
    try:
        shim.reserve(0)
    except DeviceMemoryError:
        said.append(shim._shim.gpuslice_vmm_message())
thread = threading.Thread(target=resume)
thread.start()
thread.join()
assert len(said) == 1 and said[0] and not shim._shim.gpuslice_vmm_message()
""")


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_a_resume_that_fails_while_mapping_takes_nothing(scenario: Scenario, call: str) -> None:
    scenario(
        """
for _ in range(3):
    take(2 * MIB)
shim.release(0)
try:
    shim.reserve(0)
except EnvironmentUnusableError as error:
    assert "CUDA error 999" in error.message, error.message
else:
    raise AssertionError("it did not fail")
assert cuda.fake_live_handles() == 0 and not any(block.mapped for block in shim.blocks(0))
shim.reserve(0)
assert all(block.mapped for block in shim.blocks(0)) and cuda.fake_live_handles() == 3
""",
        FAKE_CUDA_FAIL=f"{call}:5:999",
    )


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_failed_allocation_leaves_nothing_behind(scenario: Scenario, call: str) -> None:
    scenario(
        """
assert take(2 * MIB) == -2, "torch knows this code: out of memory"
assert shim.blocks(0) == [] and cuda.fake_live_handles() == cuda.fake_live_ranges() == 0
assert take(2 * MIB) > 0
""",
        FAKE_CUDA_FAIL=f"{call}:1:2",
    )


def test_threads_share_one_table(scenario: Scenario) -> None:
    scenario("""
import threading

def churn():
    cuda.fake_set_device(0)
    for _ in range(50):
        address = ctypes.c_void_p()
        assert consumer.take(ctypes.byref(address), ctypes.c_size_t(2 * MIB)) == 0
        consumer.fill(address, 1, ctypes.c_size_t(2 * MIB))
        assert consumer.give(address) == 0

threads = [threading.Thread(target=churn) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert shim.blocks(0) == [] and cuda.fake_live_handles() == cuda.fake_live_ranges() == 0
""")


def test_structures_are_those_of_cuda_h(tmp_path: Path) -> None:
    header = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include" / "cuda.h"
    words = compiler.find_compiler()
    if not header.is_file() or words is None:
        pytest.skip("no cuda.h, or no C compiler, to compare the shim's declarations with")
    source = tmp_path / "compare.c"
    checks = [
        "sizeof(struct properties) == sizeof(CUmemAllocationProp)",
        "offsetof(struct properties, location) == offsetof(CUmemAllocationProp, location)",
        "offsetof(struct properties, usage) == offsetof(CUmemAllocationProp, allocFlags.usage)",
        "sizeof(struct access) == sizeof(CUmemAccessDesc)",
        "offsetof(struct access, flags) == offsetof(CUmemAccessDesc, flags)",
        "ATTRIBUTE_VMM == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "TYPE_PINNED == CU_MEM_ALLOCATION_TYPE_PINNED && LOCATION_DEVICE == CU_MEM_LOCATION_TYPE_DEVICE",
        "ACCESS_READ_WRITE == CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
        "OUT_OF_MEMORY == CUDA_ERROR_OUT_OF_MEMORY",
        "PEER_ALREADY_ENABLED == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
    ]
    text = "".join(f'_Static_assert({check}, "{check}");\n' for check in checks)
    source.write_text(
        f'#include <stddef.h>\n#include "{shim.SOURCE}"\n#include <cuda.h>\n{text}', encoding="utf-8"
    )
    command = [*words, "-std=gnu11", "-fsyntax-only", f"-I{header.parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("environ", "conflict"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, backend:native"}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True"},
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync"),
    ],
)
def test_allocator_settings_that_bypass_the_shim(environ: dict[str, str], conflict: str) -> None:
    assert shim.allocator_conflict(environ) == conflict


def test_too_late_after_torch() -> None:
    assert torch.__version__
    with pytest.raises(EnvironmentUnusableError, match="before torch"):
        shim.preload()


def test_the_launcher_puts_the_shim_before_torch(
    cuda_libraries: Path, shim_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import ctypes\n"
        "address = ctypes.c_void_p()\n"
        "ctypes.CDLL('libcudart.so.13').cudaSetDevice(0)\n"
        "ctypes.CDLL('libconsumer.so').take(ctypes.byref(address), ctypes.c_size_t(1 << 21))\n",
        encoding="utf-8",
    )
    code = f"""
import importlib.util, sys
from pathlib import Path
import gpuslice
sys.path.insert(0, {str(tmp_path)!r})
path = Path(gpuslice.__file__).parent / "launch" / "sitedir" / "sitecustomize.py"
spec = importlib.util.spec_from_file_location("site_under_test", path)
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)
seen = []
sys.meta_path.insert(0, site.AfterImport("torch", lambda: seen.append("hooks"), site.load_shim))
import torch
from gpuslice.kernels.vmm import shim
assert seen == ["hooks"]
assert [block.address for block in shim.loaded().blocks(0)] == [torch.address.value]
"""
    environ = {"XDG_CACHE_HOME": str(shim_cache), "GPUSLICE_ROUTE": "vmm"}
    done = python(code, cuda_libraries, **environ)
    assert done.returncode == 0, done.stderr
    refused = python(code, cuda_libraries, **environ, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert refused.returncode == 3
    assert refused.stderr.startswith("gpuslice: the route vmm cannot work with PYTORCH_ALLOC_CONF=")
    without = python(code, cuda_libraries, XDG_CACHE_HOME=str(shim_cache), GPUSLICE_ROUTE="tensor")
    assert "is not in this process" in without.stderr


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_training_survives_on_a_gpu(tmp_path: Path) -> None:
    """The shim under real torch on a real GPU, a captured CUDA graph included."""
    code = """
from gpuslice.kernels.vmm.shim import preload
shim = preload()
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2048, 2048).cuda()
static = torch.randn(64, 2048, device="cuda")
for _ in range(3):
    model(static).sum().backward()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = model(static)
graph.replay()
torch.cuda.synchronize()
expected, weight = result.clone(), model.weight.detach().clone()
pointer = weight.data_ptr()
blocks = shim.blocks(0)
assert blocks, "torch got its memory elsewhere"
free_before = torch.cuda.mem_get_info()[0]
gpu, at = torch.device("cuda", 0), torch._C._construct_storage_from_data_pointer
storages = [at(block.address, gpu, block.nbytes) for block in blocks]
views = [torch.empty(0, dtype=torch.uint8, device=gpu).set_(storage) for storage in storages]
saved = [view.cpu() for view in views]
shim.release(0)
assert torch.cuda.mem_get_info()[0] - free_before >= sum(b.nbytes for b in blocks)
shim.reserve(0)
for view, its_bytes in zip(views, saved):
    view.copy_(its_bytes)
result.zero_()
graph.replay()
torch.cuda.synchronize()
assert weight.data_ptr() == pointer and torch.equal(weight, model.weight)
assert torch.equal(result, expected)
"""
    done = python(code, None, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
