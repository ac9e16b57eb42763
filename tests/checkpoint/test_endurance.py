"""Suspends and resumes leave everything level, however many they are.

``GPUSLICE_CYCLES`` says how many; ``./x soak cycles`` makes ten thousand.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.kernels.host.process_memory import HUGE_PAGE_BYTES, resident_anonymous_bytes
from gpuslice.types import DeviceName

WARM_UP_CYCLES = 200
CYCLES = int(os.environ.get("GPUSLICE_CYCLES", "1000"))
#: Resident memory changes by whole huge pages whenever the kernel puts small ones together, in a heap of
#: which earlier tests have left pieces. Of ten thousand cycles, a page lost in every other one would be more;
#: the allocators' own books tell what is less.
RESIDENT_NOISE_BYTES = 8 * HUGE_PAGE_BYTES


class MallocBook(ctypes.Structure):
    """``struct mallinfo2`` of glibc (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallocBook


def level(disk: RamDisk) -> tuple[int, int, int, int]:
    """What must not grow: bytes and files of the RAM disk, descriptors, mappings of its files."""
    files = sum(len(names) for _, _, names in os.walk(disk.directory))
    mappings = Path("/proc/self/maps").read_text().count(str(disk.directory))
    return disk.used_bytes, files, len(os.listdir("/proc/self/fd")), mappings


def in_use() -> tuple[int, int]:
    """What the allocators have given out: bytes of C's, tensors among them, and blocks of Python's."""
    gc.collect()
    book = mallinfo()
    return book.uordblks + book.hblkhd, sys.getallocatedblocks()


@pytest.mark.slow
def test_many_cycles_leave_memory_files_and_descriptors_level(disk: RamDisk) -> None:
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
            cycles(WARM_UP_CYCLES)
            before, resident, (c_bytes, python_blocks) = level(disk), resident_anonymous_bytes(), in_use()
            cycles(CYCLES)
            c_bytes_after, python_blocks_after = in_use()
            assert level(disk) == before
            assert c_bytes_after - c_bytes < 20 * CYCLES
            assert python_blocks_after - python_blocks < CYCLES // 2
            assert resident_anonymous_bytes() - resident < RESIDENT_NOISE_BYTES
        finally:
            gc.unfreeze()
    assert torch.equal(weight, torch.arange(1000.0))
    assert torch.equal(moment, torch.full((300,), 1.0 + WARM_UP_CYCLES + CYCLES))
