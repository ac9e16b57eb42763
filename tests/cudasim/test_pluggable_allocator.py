"""A script that puts an allocator of its own in the place of torch's, which then keeps no count."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cudasim
import msgspec
import pytest

from gpuslice.profiler.recorder import Recording

from ..cli.waiting import until
from ..gpuslice.conftest import Workshop
from .test_jobs import Site, site
from .test_scripts import switches, undisturbed

__all__ = ["site"]

SOURCE = """
#include <cstddef>
extern "C" {
int cudaMalloc(void**, size_t);
int cudaFree(void*);
void* own_alloc(ptrdiff_t size, int, void*) {
    void* address = nullptr;
    return cudaMalloc(&address, size) ? nullptr : address;
}
void own_free(void* address, ptrdiff_t, int, void*) { cudaFree(address); }
}
"""
CHANGE = """
import torch
own = torch.cuda.memory.CUDAPluggableAllocator({library!r}, "own_alloc", "own_free")
torch.cuda.memory.change_current_allocator(own)
"""
TRAIN = """
from torch.utils.data import DataLoader
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for batch in DataLoader(torch.randn(96, 64), batch_size=4):
    loss = model(batch.cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
import hashlib
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.fixture(scope="module")
def change(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The lines that a script changes its allocator with."""
    directory = tmp_path_factory.mktemp("allocator")
    library, source = directory / "libown.so", directory / "own.cpp"
    source.write_text(SOURCE, encoding="utf-8")
    runtime = cudasim.runtime_path()
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source, runtime], check=True)
    return CHANGE.format(library=str(library))


def test_a_state_in_it_is_suspended_and_resumed(warm_workshop: Workshop, change: str) -> None:
    script, report = (
        str(warm_workshop.write("train.py", change + TRAIN)),
        warm_workshop.directory / "report.json",
    )
    words = ("--device", "cuda:0", "--suspend-every", "5", "--report", str(report), script)
    done = warm_workshop.gpuslice_run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == undisturbed(warm_workshop, script)
    assert [switch["bytes_freed"] > 0 for switch in switches(report)] == [True] * 5


def test_a_profile_leaves_open_what_it_does_not_count(warm_workshop: Workshop, change: str) -> None:
    warm_workshop.write("train.py", change + TRAIN)
    path = warm_workshop.directory / "profile.json"
    warm_workshop.environ |= {"GPUSLICE_PROFILE": str(path), "GPUSLICE_PROFILE_STEPS": "8"}
    done = warm_workshop.gpuslice_run("--device", "cuda:0", "train.py")
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(path.read_bytes(), type=Recording)
    assert len(found.interval_s) == 8
    assert found.memory is not None
    assert (found.memory.peak_bytes, found.memory.boundary_bytes, found.memory.reserved_bytes) == (None,) * 3
    assert found.memory.tensors_bytes


def test_that_it_keeps_no_memory_limit_is_said(warm_workshop: Workshop, change: str) -> None:
    warm_workshop.write(
        "train.py", change + "kept = torch.ones(10, device='cuda:0')\nprint(kept.sum().item())\n"
    )
    done = warm_workshop.gpuslice_run("--device", "cuda:0", "--memory", "100MiB", "train.py")
    assert (done.returncode, done.stdout) == (0, "10.0\n"), done.stderr
    assert "keeps no memory limit; that of 100.00 MiB does not hold" in done.stderr


def test_a_scheduler_s_job_is_listed_suspended_and_resumed(site: Site, change: str) -> None:
    long = TRAIN.replace("torch.randn(96, 64)", "torch.randn(400_000, 64)")  # it is cancelled
    site.script.write_text(change + long, encoding="utf-8")
    client = site.up("cuda:0", "--policy", "fifo")
    job = site.submit(client)
    until(client, job, lambda info: info.steps > 5)
    client.suspend(job)
    until(client, job, lambda info: info.state == "suspended")
    assert job in site.shell("ps")
    client.resume(job)
    resumed = until(client, job, lambda info: info.state == "running")
    until(client, job, lambda info: info.steps > resumed.steps + 5)
    assert "Traceback" not in Path(client.logs(job).err).read_text(encoding="utf-8")
    client.cancel(job)
    site.shell("down")
