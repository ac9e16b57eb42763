"""The ranks of a gang come back in their own processes, on devices of their own: none waits for another."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..patience import PATIENCE_S
from .conftest import MIB

#: A rank on the CPU slot of its number. It obeys lines on stdin and answers each; told to ``hold`` a stage of
#: its next resume, it stops there with half of the bytes back until it is told to go on.
RANK = f"""
import sys
from pathlib import Path
import torch
from gpuslice.checkpoint.format import reader
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

directory, rank = Path(sys.argv[1]), int(sys.argv[2])
held = None

def say(word):
    print(word, flush=True)

def midway(stage):
    global held
    if held == stage:
        held = None
        say("midway")
        assert sys.stdin.readline() == "go on\\n"

class Device(CpuDevice):
    def copy_in(self, pairs, arena, inspect=None, checksums=None):
        half = len(pairs) // 2
        super().copy_in(pairs[:half], arena, inspect, checksums)
        midway("copy")
        return super().copy_in(pairs[half:], arena, inspect, checksums)

verify = reader.SnapshotFile.verify

def verify_later(snapshot, pause=None):
    if snapshot.path.parent.name == "spill":
        midway("fetch")
    verify(snapshot, pause)

reader.SnapshotFile.verify = verify_later
device = Device(DeviceName("cpu", rank), slots=2)
device.pin()
disk = RamDisk(directory / "disk", {256 * MIB}, spill_directory=directory / "spill")
state = [torch.full((500_000 + number,), float(8 * rank + number)) for number in range(8)]
with disk.open_store("gang", rank) as store:
    switch = Switch(device, store)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "suspend":
            switch.suspend(boundary=1)
            say("parked")
        elif verb == "spill":
            say(store.slots[switch.snapshot.record.slot].free_memory(wanted=True))
        elif verb == "hold":
            held, = words
            say("told")
        elif verb == "resume":
            switch.resume()
            say(all(bool((tensor == 8 * rank + number).all()) for number, tensor in enumerate(state)))
"""


class Rank:
    """The parent's end of one."""

    def __init__(self, directory: Path, number: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(directory), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._said, self._told = self._process.stdout, self._process.stdin

    def tell(self, line: str) -> None:
        self._told.write(f"{line}\n")
        self._told.flush()

    def hear(self) -> str:
        """The answer to what it was told last."""
        assert select.select([self._said], [], [], PATIENCE_S)[0], "it waits"
        return self._said.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.hear()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._told.close()


@pytest.fixture
def gang(shm: Path) -> Iterator[list[Rank]]:
    ranks = [Rank(shm, number) for number in range(2)]
    yield ranks
    for rank in ranks:
        rank.end()


@pytest.mark.slow
def test_no_rank_waits_for_another_to_come_back(gang: list[Rank]) -> None:
    """One stands still in the midst of its copy, or of reading what was spilled; the other comes back."""
    for stage in ("copy", "fetch"):
        for one, other in (gang, gang[::-1]):
            for rank in gang:
                assert rank.ask("suspend") == "parked"
                if stage == "fetch":
                    assert rank.ask("spill") == "True"
            assert one.ask(f"hold {stage}") == "told"
            assert one.ask("resume") == "midway"
            assert other.ask("resume") == "True"
            assert one.ask("go on") == "True"
