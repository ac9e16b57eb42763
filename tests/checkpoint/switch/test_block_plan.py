"""The suspend transaction by the vmm route: real shim, real RAM disk, CPU torch, fake CUDA driver in C."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ...fakes.build import SHIM_PREAMBLE, python

PREAMBLE = """
import torch
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import *
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName
from pathlib import Path

store = RamDisk(Path(os.environ["RAMDISK"])).open_store(None)
switch = Switch(open_device(DeviceName.parse("cpu")), store, shim=shim)
SIZES = [2 * MIB, 5 * MIB + 12, 3 * MIB]
addresses = [take(nbytes, 40 + i) for i, nbytes in enumerate(SIZES)]

def intact():
    return all(bytes_at(a, n) == bytes([40 + i]) * n for i, (a, n) in enumerate(zip(addresses, SIZES)))

def fails(kind, call):
    try:
        call()
    except GpusliceError as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError("it did not fail")

"""
Scenario = Callable[..., None]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(f"/dev/shm/gpuslice-test-{os.getpid()}-{secrets.token_hex(4)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def scenario(cuda_libraries: Path, shim_cache: Path, directory: Path) -> Scenario:
    def run(code: str, **environ: str) -> None:
        environ |= {"XDG_CACHE_HOME": str(shim_cache), "RAMDISK": str(directory)}
        done = python(
            SHIM_PREAMBLE + PREAMBLE + code + "\nstore.close(keep=False)\n", cuda_libraries, **environ
        )
        assert done.returncode == 0, done.stderr

    return run


def test_blocks_go_to_the_ram_disk_and_come_back(scenario: Scenario) -> None:
    scenario("""
for boundary in (3, 5):
    record = switch.suspend(boundary=boundary)
    assert cuda.fake_live_bytes(0) == 0 and cuda.fake_live_ranges() == 3
    assert record.route == "vmm"
    assert record.bytes_found == record.bytes_copied == record.bytes_freed == sum(SIZES)
    assert record.bytes_resident == record.bytes_unaccounted == 0
    with open_snapshot(switch.snapshot.path) as snapshot:
        snapshot.verify()
        assert [storage.nbytes for storage in snapshot.storages] == [b.nbytes for b in shim.blocks(0)]
    assert record.bytes_unchanged == (sum(SIZES) if boundary == 5 else 0)
    assert switch.resume().verified
    assert intact()
""")


@pytest.mark.slow
def test_named_tensors_are_views_of_their_blocks(scenario: Scenario) -> None:
    scenario("""
from gpuslice.checkpoint.switch.block_plan import plan_blocks

memory = (ctypes.c_uint8 * SIZES[1]).from_address(addresses[1])
inside = torch.frombuffer(memory, dtype=torch.int32)[1024:2048].view(32, 32).t()
outside = torch.arange(7)
plan = plan_blocks(shim, switch.device, [], [("weight", inside), ("order", outside), ("tail", outside[3:])])
weight, order, tail = plan.tensors
starts = [storage.data_ptr() for storage in plan.storages]
assert (weight.sid, weight.offset, weight.stride) == (starts.index(addresses[1]), 1024, (1, 32))
assert (order.sid, order.offset, tail.sid, tail.offset) == (3, 0, 3, 3)
record = switch.suspend(boundary=1, named={"weight": inside, "order": outside}, restartable=True)
assert switch.snapshot.restartable and record.bytes_copied == sum(SIZES) + 56
switch.resume()
assert intact()
""")


@pytest.mark.slow
def test_a_resume_that_fails_takes_nothing_and_can_be_tried_again(scenario: Scenario) -> None:
    scenario("""
def still_away():
    return switch.suspended and cuda.fake_live_handles() == 0

switch.suspend(boundary=1)
os.environ["FAKE_CUDA_BYTES"] = str(4 * MIB)
fails(DeviceMemoryError, switch.resume)
del os.environ["FAKE_CUDA_BYTES"]
assert still_away()

path = switch.snapshot.path
at = path.read_bytes().index(bytes([41]) * 4096)
with path.open("r+b") as file:
    file.seek(at)
    file.write(b"?")
fails(CorruptSnapshotError, switch.resume)
assert still_away()
with path.open("r+b") as file:
    file.seek(at)
    file.write(bytes([41]))

other = open_device(DeviceName.parse("null:0"))
other.torch_device = torch.device("meta")
assert "cannot move" in fails(SuspendRefusedError, lambda: switch.resume(other))
assert still_away()

switch.resume()
assert intact()
""")


@pytest.mark.parametrize(
    "script",
    [
        "cuMemUnmap:2:999",
        pytest.param("cuCtxSynchronize:3:700", marks=pytest.mark.repeats),
    ],
)
def test_a_suspend_that_fails_changes_nothing(scenario: Scenario, script: str) -> None:
    scenario(
        """
fails(EnvironmentUnusableError, lambda: switch.suspend(boundary=1))
assert not switch.suspended and intact() and cuda.fake_live_handles() == 3
switch.suspend(boundary=2)
switch.resume()
assert intact()
""",
        FAKE_CUDA_FAIL=script,
    )


@pytest.mark.slow
def test_a_failed_undo_names_both_failures(scenario: Scenario) -> None:
    scenario(
        """
os.environ["FAKE_CUDA_BYTES"] = str(2 * MIB)  # what was given back cannot be taken again
text = fails(RollbackError, lambda: switch.suspend(boundary=1))
assert "999" in text and "lacks memory" in text, text
""",
        FAKE_CUDA_FAIL="cuMemUnmap:3:999",
    )
