"""The matrix, with another process that has the device whenever the case is parked, both ways in portions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.checkpoint.switch.swap_endpoints import Successor, SuccessorEnd, SwapListener
from gpuslice.checkpoint.switch.swap_protocol import Terms
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import Device
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

from ..patience import PATIENCE_S
from .cases.registry import CASES
from .remote import Remote
from .swapper import make_memory
from .test_matrix import marks, plain, suspended

#: As in test_lazy: those that might well notice; the others are slow only because they are so many.
QUICK = {"adam", "dropout", "pending_graph", "views_of_one_storage"}
NAMES = [
    pytest.param(name, marks=[*marks(name), *([] if name in QUICK else [pytest.mark.slow])])
    for name in sorted(CASES)
]


class Swapping(Switch):
    """Gives the device to another process at every suspend, and takes it from there at every resume."""

    def __init__(self, store: JobStore, partner: Remote, directory: Path) -> None:
        super().__init__(CpuDevice(DeviceName("cpu", None)), store)
        self._mine, self._partner, self._directory = store.directory, partner, directory
        self.given_bytes = self.taken_bytes = 0

    def suspend(self, **options: Any) -> SwitchRecord:
        self._partner.ask("open", predecessor="case")
        self._partner.tell("arrive")
        there = Successor(self._directory, Terms("case", "partner", 3, "cpu"), portion_bytes=4096)
        record = super().suspend(**options, successor=there)
        self._partner.result()
        self.given_bytes += record.bytes_given
        return record

    def resume(self, device: Device | None = None, *, swap: SuccessorEnd | None = None) -> SwitchRecord:
        listener = SwapListener(self._mine, Terms("partner", "case", 3, "cpu"), portion_bytes=4096)
        self._partner.tell("leave", successor="case")
        swap = listener.await_predecessor(PATIENCE_S)
        assert swap is not None
        record = super().resume(device, swap=swap)
        listener.close()
        self._partner.result()
        self.taken_bytes += record.bytes_taken
        return record


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_the_matrix_survives(
    name: str, disk: RamDisk, tmp_path: Path, troupe: Callable[[Path, Path], Remote]
) -> None:
    make_memory(tmp_path / "memory")
    expected = plain(CASES[name]())
    partner = troupe(disk.directory, tmp_path / "memory")
    partner.ask("prepare", name="partner")
    partner.ask("suspend")
    with disk.open_store("case") as store:
        switch = Swapping(store, partner, disk.directory / "partner.r0")
        assert suspended(CASES[name](), switch) == expected
        # Of little nothing is given back that the kernel would notice.
        assert switch.given_bytes > 0 or name not in QUICK
        assert partner.ask("whole") == ["suspended", True]
    partner.ask("resume")
    assert partner.ask("whole") == ["running", True]
    partner.kill()
