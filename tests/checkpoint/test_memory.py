"""How much memory a parked job keeps, and how much of the host its snapshots take."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.named.state import check
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch

from .format.test_checksums import Watched
from .harness import SpyGate

MIB = 1 << 20
#: Large enough that the rounding to huge pages does not show.
STATE_BYTES = 128 * MIB


@pytest.mark.slow
def test_snapshots_take_hardly_more_than_the_state(disk: RamDisk) -> None:
    """Two restartable ones after each other; and the process itself keeps next to nothing."""
    roomy = RamDisk(disk.directory, 3 * STATE_BYTES)
    tensors = [torch.ones(STATE_BYTES // 64, dtype=torch.uint8) for _ in range(64)]
    gc.collect()
    with roomy.open_store("job") as store:
        switch = Switch(Watched(tensors), store, gate=SpyGate())
        for boundary in (1, 2):
            named = {str(number): tensor for number, tensor in enumerate(tensors)}
            record = switch.suspend(boundary=boundary, named=named, restartable=True)
            left_bytes = STATE_BYTES - (record.rss_before_bytes - record.rss_parked_bytes)
            assert left_bytes < 0.05 * STATE_BYTES
            switch.resume()
        assert roomy.used_bytes <= 2.05 * STATE_BYTES
    assert all(bool(tensor.eq(1).all()) for tensor in tensors)


def test_what_a_store_had_mapped_goes_without_the_collector(disk: RamDisk) -> None:
    """When it is closed, and those who used it are gone."""
    tensor = torch.ones(MIB)

    def life() -> None:
        with disk.open_store("job") as store:
            switch = Switch(Watched([tensor]), store, gate=SpyGate())
            for boundary in (1, 2):
                switch.suspend(boundary=boundary, named={"t": tensor}, restartable=True)
                switch.resume()
            assert switch.snapshot is not None
            with open_snapshot(switch.snapshot.path) as snapshot:
                check(snapshot, {"t": tensor}).apply()
            assert mapped(disk)

    gc.disable()
    try:
        life()
        assert mapped(disk) == []
    finally:
        gc.enable()


def mapped(disk: RamDisk) -> list[str]:
    """This process's mappings of files that are or were in the RAM disk."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(disk.directory) in line]
