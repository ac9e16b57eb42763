"""Imports are hidden from sweeps; what the script makes, or freezes itself, is not."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, torch
from gpuslice.checkpoint import heap
from gpuslice.checkpoint.discover import sweep
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.types import DeviceName

device = CpuDevice(DeviceName("cpu", None))
everything = len(gc.get_objects())
heap.hide_imports()
assert len(gc.get_objects()) < everything / 20

def found(nbytes):
    return sum(entry.nbytes == nbytes for entry in sweep(device))

first = torch.ones(1001)
assert found(4004) == 1
assert gc.get_freeze_count() > everything / 2, "imports stay hidden"

second = torch.ones(1002)
gc.freeze()
assert found(4004) == found(4008) == 1
assert gc.get_freeze_count() == 0

third = torch.ones(1003)
gc.freeze()
assert found(4004) == found(4008) == found(4012) == 1
"""


def test_what_is_made_later_is_found_whoever_freezes() -> None:
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
