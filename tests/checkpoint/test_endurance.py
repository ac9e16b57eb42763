"""Ten thousand suspends and resumes leave everything level."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from gpuslice.checkpoint.heap import hide_imports
from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.switch import Switch
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.kernels.host import resident_anonymous_bytes
from gpuslice.types import DeviceName

#: The C allocator's own noise; a leak of a hundred bytes per cycle would be more.
NOISE_BYTES = 1 << 20


def level(disk: RamDisk) -> tuple[int, int, int, int]:
    """What must not grow: bytes and files of the RAM disk, descriptors, mappings of its files."""
    files = sum(len(names) for _, _, names in os.walk(disk.directory))
    mappings = Path("/proc/self/maps").read_text().count(str(disk.directory))
    return disk.used_bytes, files, len(os.listdir("/proc/self/fd")), mappings


@pytest.mark.slow
def test_ten_thousand_cycles_leave_memory_files_and_descriptors_level(disk: RamDisk) -> None:
    gc.collect()
    hide_imports()  # as the launcher does; what the tests before left is not swept again and again
    weight, moment = torch.arange(1000.0), torch.ones(300)
    with disk.open_store("steady") as store:
        switch = Switch(CpuDevice(DeviceName.parse("cpu")), store)
        named = {"weight": weight, "moment": moment}

        def cycles(count: int) -> None:
            for boundary in range(count):
                switch.suspend(boundary=boundary, named=named, restartable=True)
                switch.resume()
                moment.add_(1)

        try:
            cycles(500)
            before, resident = level(disk), resident_anonymous_bytes()
            cycles(10_000)
            gc.collect()
            assert level(disk) == before
            assert resident_anonymous_bytes() - resident < NOISE_BYTES
        finally:
            gc.unfreeze()
    assert torch.equal(weight, torch.arange(1000.0))
    assert torch.equal(moment, torch.full((300,), 10_501.0))
