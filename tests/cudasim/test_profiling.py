"""Profiles on the simulated GPU: steps by CUDA events, memory by torch's allocator and the driver."""

from __future__ import annotations

import msgspec

from gpuslice.profiler.recorder import Recording

from ..gpuslice.conftest import Workshop

MIB = 1 << 20
#: 8 MiB stay; every step needs 32 MiB for a while.
TRAIN = """
import torch
from torch.utils.data import DataLoader
kept = torch.nn.Parameter(torch.ones(2 << 20, device="cuda:0"))
optimizer = torch.optim.SGD([kept], lr=0.1)
for batch in DataLoader(torch.ones(80, 4), batch_size=2):
    kept.grad = torch.ones_like(kept)
    optimizer.step()
    kept.grad = None
    torch.empty(8 << 20, device="cuda:0").fill_(1)
    torch.cuda.synchronize()
"""


def test_a_job_on_a_gpu(warm_workshop: Workshop) -> None:
    warm_workshop.write("train.py", TRAIN)
    path = warm_workshop.directory / "profile.json"
    warm_workshop.environ |= {"GPUSLICE_PROFILE": str(path), "GPUSLICE_PROFILE_STEPS": "20"}
    done = warm_workshop.gpuslice_run("train.py")
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(path.read_bytes(), type=Recording)
    assert (found.clock, len(found.interval_s)) == ("cuda", 20)
    assert min(found.interval_s) > 0
    memory = found.memory
    assert memory is not None
    assert memory.peak_bytes is not None
    assert 40 * MIB <= memory.peak_bytes < 50 * MIB
    assert memory.boundary_bytes is not None
    assert 8 * MIB <= memory.boundary_bytes < 9 * MIB
    assert memory.tensors_bytes is not None
    assert 8 * MIB <= memory.tensors_bytes < 9 * MIB
    assert memory.context_bytes is not None
    assert memory.context_bytes > 0
    assert memory.unaccounted_bytes is not None
    assert memory.unaccounted_bytes < 2 * MIB
    assert found.skew is not None
    assert found.skew.bytes == 8 * MIB
