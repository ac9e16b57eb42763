"""A step of a job that nobody suspends asks as much of CUDA as without gpuslice."""

from __future__ import annotations

import json

import pytest

from ..gpuslice.conftest import Workshop

pytestmark = pytest.mark.simulated

#: Prints what CUDA was asked for in steps that are warm.
STEPS = """
import json, cudasim, torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(32, 8).to("cuda:0")
optimizer = torch.optim.Adam(model.parameters(), fused=True)
for number, batch in enumerate(DataLoader(torch.randn(120, 32), batch_size=4)):
    if number == 10:
        before = cudasim.counts()
    optimizer.zero_grad()
    model(batch.to("cuda:0")).square().mean().backward()
    optimizer.step()
found = cudasim.since(before)
ASKING = ("cudaGetDevice", "cuDevicePrimaryCtxGetState", "cudaEventQuery", "cudaStreamIsCapturing")
print(json.dumps({name: n for name, n in found.items() if name not in ASKING}))
"""


def test_an_idle_step_makes_the_calls_of_plain_training(warm_workshop: Workshop) -> None:
    script = str(warm_workshop.write("steps.py", STEPS))
    plain = warm_workshop.python(script)
    ours = warm_workshop.gpuslice_run("--device", "cuda:0", "--suspend-at", "1000", script)
    assert (plain.returncode, ours.returncode) == (0, 0), plain.stderr + ours.stderr
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert "cudaDeviceSynchronize" not in json.loads(ours.stdout)
