"""A CUDA error of the script's own from which its GPU does not recover: one traceback, and nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..gpuslice.conftest import Workshop

pytestmark = pytest.mark.simulated

TRAIN = """
import cudasim, torch
from torch.utils.data import DataLoader
state = torch.ones(8 << 20, device="cuda:0")
for step, batch in enumerate(DataLoader(torch.ones(12, 4))):
    state += batch.to("cuda:0").sum()
    if step == 7:
        cudasim.fail({call!r}, 719, sticky=True)
        state.sum().item()
"""


@pytest.mark.parametrize("call", ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"])
def test_the_script_s_own_error_is_the_only_one_that_is_told(warm_workshop: Workshop, call: str) -> None:
    script = str(warm_workshop.write("train.py", TRAIN.format(call=call)))
    done = warm_workshop.gpuslice_run("--device", "cuda:0", "--suspend-every", "3", script)
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "Exception ignored" not in done.stderr
    assert "unspecified launch failure" in done.stderr
    assert files(warm_workshop.ramdisk) == []


def files(directory: Path) -> list[Path]:
    """What has bytes in it: a lock may stay, an arena may not."""
    return [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 4096]
