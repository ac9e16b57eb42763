"""CpuDevice: which storages it frees, discards or leaves, slots, and that memory really goes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpuslice import memory
from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels import Hold, Way
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.types import DeviceName

from ...patience import PATIENCE_S

MIB = 1 << 20


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(DeviceName("cpu", None))


def hold(device: CpuDevice, tensor: torch.Tensor, *, fixed: bool = False, exposed: bool = False) -> Hold:
    storage = tensor.untyped_storage()
    fixed_ids, exposed_ids = ({storage._cdata} if held else set() for held in (fixed, exposed))
    return device.holds([storage], fixed=fixed_ids, exposed=exposed_ids)[0]


def test_torch_memory_is_freed(device: CpuDevice) -> None:
    assert hold(device, torch.ones(1000)).way is Way.FREED


def test_memory_at_a_known_address_is_discarded(device: CpuDevice) -> None:
    assert hold(device, torch.ones(MIB), fixed=True).way is Way.DISCARDED


@pytest.mark.parametrize(
    "make", [lambda: torch.from_numpy(np.ones(MIB)), lambda: _shown_to_numpy(torch.ones(MIB))]
)
def test_memory_shared_with_numpy_is_discarded(device: CpuDevice, make: object) -> None:
    assert callable(make)
    assert hold(device, make()).way is Way.DISCARDED


def _shown_to_numpy(tensor: torch.Tensor) -> torch.Tensor:
    tensor.numpy()
    return tensor


def test_discarded_memory_comes_back_at_its_address(device: CpuDevice) -> None:
    array = np.arange(MIB)
    tensor = torch.from_numpy(array)
    storage = tensor.untyped_storage()
    view = memoryview(bytearray(storage.nbytes()))
    device.copy_out([(storage, 0)], view)
    device.discard([storage])
    assert (array[1000:-1000] == 0).all(), "whole pages inside read as zeros"
    device.copy_in([(storage, 0)], view)
    assert np.array_equal(array, np.arange(MIB))


def test_numpy_memory_stays_while_another_thread_could_read_it(device: CpuDevice) -> None:
    found = hold(device, torch.from_numpy(np.ones(MIB)), exposed=True)
    assert found == Hold(Way.RESIDENT, "other code could read its memory meanwhile, as a NumPy array does")


def test_small_numpy_memory_stays(device: CpuDevice) -> None:
    found = hold(device, torch.from_numpy(np.ones(10)))
    assert found.way is Way.RESIDENT
    assert "too small" in found.reason


def test_shared_memory_stays(device: CpuDevice) -> None:
    found = hold(device, torch.ones(MIB).share_memory_())
    assert found == Hold(Way.RESIDENT, "shared memory or a mapped file")


def test_mapped_files_stay(device: CpuDevice, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(MIB))
    mapped = torch.from_file(str(path), size=MIB, dtype=torch.uint8)
    assert hold(device, mapped).way is Way.RESIDENT
    through_numpy = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
    assert hold(device, through_numpy).reason == "its memory is not private, anonymous and writable"


class Stingy(torch.UntypedStorage):
    """A storage for which there is no memory."""

    def resize_(self, size: int) -> None:
        if size:
            raise RuntimeError("can't allocate memory")


def test_reserving_is_all_or_nothing(device: CpuDevice) -> None:
    plenty = torch.ones(1000).untyped_storage()
    device.free([plenty])
    stingy = Stingy(0)
    with pytest.raises(DeviceMemoryError, match=r"can map no further .*ulimit -v"):  # memory there is
        device.reserve([(plenty, 4000), (stingy, 4000)])
    assert plenty.nbytes() == 0


def test_memory_that_the_host_does_not_have_is_not_promised(device: CpuDevice) -> None:
    empty = torch.ones(1000).untyped_storage()
    device.free([empty])
    wanted_bytes = device.memory().total_bytes * 2
    with pytest.raises(DeviceMemoryError, match=f"take back {wanted_bytes} bytes"):
        device.reserve([(empty, wanted_bytes)])
    assert empty.nbytes() == 0


def test_memory_that_the_control_group_does_not_allow_is_not_taken(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.ones(1000).untyped_storage()
    device.free([empty])
    monkeypatch.setattr("gpuslice.kernels.host.device.available_bytes", lambda: 3999)
    with pytest.raises(DeviceMemoryError, match="take back 4000 bytes: 3999 are available"):
        device.reserve([(empty, 4000)])
    assert empty.nbytes() == 0


def test_pages_that_were_dropped_need_memory_again(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = torch.from_numpy(np.ones(MIB)).untyped_storage()
    pairs = [(storage, storage.nbytes())]
    monkeypatch.setattr("gpuslice.kernels.host.device.available_bytes", lambda: 4 * MIB)
    device.reserve(pairs)
    device.discard([storage])
    with pytest.raises(DeviceMemoryError, match="lacks the memory"):
        device.reserve(pairs)


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """This process's cores and threads, put back afterwards."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield set(before)
    os.sched_setaffinity(0, before)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), before)
    torch.set_num_threads(threads)


def test_slots_are_equal_and_disjoint(cores: set[int]) -> None:
    slots = [CpuDevice(DeviceName("cpu", index), slots=len(cores)) for index in range(len(cores))]
    assert {len(slot.cores) for slot in slots} == {1}
    assert set.union(*(set(slot.cores) for slot in slots)) == cores


def test_more_slots_than_cores_share_them(cores: set[int]) -> None:
    count = 2 * len(cores)
    last = CpuDevice(DeviceName("cpu", count - 1), slots=count)
    assert len(last.cores) == 1
    assert last.cores <= cores


def test_pinning_moves_every_thread_of_the_process(cores: set[int]) -> None:
    for index in range(len(cores)):
        slot = CpuDevice(DeviceName("cpu", index), slots=len(cores))
        slot.pin()
        tasks = [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(task)) for task in tasks} == {slot.cores}
        assert torch.get_num_threads() == len(slot.cores)


def test_the_whole_host_pins_nothing(cores: set[int]) -> None:
    before = torch.get_num_threads()
    CpuDevice(DeviceName("cpu", None)).pin()
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, before)


def test_pinning_never_adds_threads(cores: set[int]) -> None:
    torch.set_num_threads(1)
    CpuDevice(DeviceName("cpu", 0), slots=1).pin()
    assert torch.get_num_threads() == 1


RESIDENT_SET = """
import numpy as np, torch
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.kernels.host.process_memory import resident_anonymous_bytes
from gpuslice.types import DeviceName
device = CpuDevice(DeviceName("cpu", None))
tensors = [torch.ones(size) for size in [100, 3000, 40_000, 5_000_000] * 3]
tensors += [torch.ones(20_000) for _ in range(100)]
arrays = [torch.from_numpy(np.ones(500_000)) for _ in range(5)]
freed, discarded = ([tensor.untyped_storage() for tensor in kind] for kind in (tensors, arrays))
before = resident_anonymous_bytes()
nbytes = sum(storage.nbytes() for storage in freed + discarded)
for _ in range(2):  # the second time glibc keeps what was once mapped in its heap
    sizes = [(storage, storage.nbytes()) for storage in freed]
    device.free(freed)
    device.discard(discarded)
    device.release_caches()
    print((before - resident_anonymous_bytes()) / nbytes)
    device.reserve(sizes)
    for tensor in tensors + arrays:
        tensor.fill_(1)
"""


def test_freed_memory_leaves_the_resident_set() -> None:
    child = subprocess.run(
        [sys.executable, "-c", RESIDENT_SET], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    shares = [float(line) for line in child.stdout.split()]
    assert len(shares) == 2
    assert min(shares) >= 0.9, shares


def test_a_job_comes_back_where_the_kernel_does_not_say_what_is_free(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    storage = torch.ones(1000).untyped_storage()
    device.free([storage])
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    device.reserve([(storage, 4000)])
    assert storage.nbytes() == 4000
