"""Memory that nobody writes to is not read again; and whatever is written is in the next snapshot."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.snapshot import SnapshotFile, open_snapshot
from gpuslice.checkpoint.store import JobStore
from gpuslice.checkpoint.switch import Switch
from gpuslice.errors import CorruptSnapshotError
from gpuslice.kernels import writes
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.types import DeviceName

from .conftest import MIB

#: Large enough to have huge pages of its own wherever it lies.
BASE_BYTES = 24 * MIB
#: From then on what has not changed meanwhile is watched.
SUSPENDS = 5


class Job:
    """A base that is rarely written, as its bytes should be, and a weight that every step changes."""

    def __init__(self, store: JobStore, *, verify: bool = True) -> None:
        self.base = torch.arange(BASE_BYTES // 4, dtype=torch.int32)
        self.expected = self.base.numpy().copy()
        self.weight = torch.zeros(1000)
        self.switch = Switch(CpuDevice(DeviceName("cpu", None)), store, verify=verify)
        self.boundary = 0

    def write(self, how: Callable[[torch.Tensor, int, int], object], at: int, value: int) -> None:
        how(self.base, at, value)
        self.expected[at] = value

    def step(self) -> dict[str, int]:
        """A step, a suspend and a resume, with everything compared; the bytes of the copy by path."""
        self.weight.add_(1)
        self.boundary += 1
        record = self.switch.suspend(boundary=self.boundary, named={"base": self.base})
        assert self.switch.snapshot is not None
        with open_snapshot(self.switch.snapshot.path) as snapshot:
            snapshot.verify()
            (entry,) = snapshot.tensors
            stored = np.frombuffer(snapshot.view(entry.sid), np.int32)
            assert np.array_equal(stored, self.expected)
        self.switch.resume()
        assert np.array_equal(self.base.numpy(), self.expected)
        assert torch.equal(self.weight, torch.full((1000,), float(self.boundary)))
        return dict(record.copy_out.paths)


@pytest.fixture
def job(disk: RamDisk) -> Iterator[Job]:
    with disk.open_store("steady") as store:
        yield Job(store)


@pytest.fixture
def watched(job: Job) -> Job:
    """A job whose base is watched."""
    if writes._userfaultfd() is None:
        pytest.skip("this kernel does not say what was written")
    gc.collect()  # tensors that other tests have left would go meanwhile, and the rest be moved
    for _ in range(SUSPENDS):
        paths = job.step()
    assert paths["unread"] > 0
    return job


def _address(base: torch.Tensor, at: int) -> int:
    return base.data_ptr() + 4 * at


WAYS: dict[str, Callable[[torch.Tensor, int, int], Any]] = {
    "torch": lambda base, at, value: base.__setitem__(at, value),
    "data": lambda base, at, value: base.data.__setitem__(at, value),
    "a view": lambda base, at, value: base.view(torch.uint8)[4 * at : 4 * at + 4].copy_(
        torch.tensor([value], dtype=torch.int32).view(torch.uint8)
    ),
    "numpy": lambda base, at, value: base.numpy().__setitem__(at, value),
    "dlpack": lambda base, at, value: np.from_dlpack(base.detach()).__setitem__(at, value),
    "C": lambda base, at, value: ctypes.memmove(_address(base, at), value.to_bytes(4, "little"), 4),
}


def test_what_nobody_writes_is_not_read(watched: Job) -> None:
    paths = watched.step()
    assert paths["unread"] > BASE_BYTES // 2
    assert sum(paths.values()) >= BASE_BYTES + 4000  # with what other tests have left


@pytest.mark.parametrize("way", WAYS)
def test_a_single_write_is_in_the_next_snapshot(watched: Job, way: str) -> None:
    unread = watched.step()["unread"]
    for at in (BASE_BYTES // 8, BASE_BYTES // 8 + 5000):
        watched.write(WAYS[way], at, 7)
        paths = watched.step()
        assert paths["host"] >= 4000
        assert paths.get("unread", 0) < unread
    for _ in range(SUSPENDS):
        paths = watched.step()
    assert paths["unread"] == unread


@pytest.mark.slow
def test_any_writes_at_any_time(watched: Job) -> None:
    chance = random.Random(5)
    for _ in range(40):
        for _ in range(chance.choice([0, 0, 0, 1, 3])):
            at = chance.choice([0, BASE_BYTES // 4 - 1, chance.randrange(BASE_BYTES // 4)])
            watched.write(WAYS[chance.choice(list(WAYS))], at, chance.randrange(1 << 30))
        watched.step()


def test_other_memory_at_the_same_address_is_what_is_saved(watched: Job) -> None:
    address = watched.base.data_ptr()
    for value in range(4):
        watched.base = torch.full_like(watched.base, value)  # may or may not lie where the former one lay
        watched.expected[:] = value
        watched.step()
        if watched.base.data_ptr() != address:
            watched.base.set_(torch.full_like(watched.base, -value))
            watched.expected[:] = -value
            watched.step()


def test_a_suspend_that_fails_forgets_nothing_and_makes_nothing_up(
    watched: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuslice.checkpoint.writer import SnapshotWriter

    def broken(*_: object, **__: object) -> None:
        raise OSError("no")

    for at in (3, BASE_BYTES // 8):
        watched.write(WAYS["numpy"], at, 11)
        with monkeypatch.context() as patch:
            patch.setattr(SnapshotWriter, "publish", broken)
            with pytest.raises(OSError, match="no"):
                watched.switch.suspend(boundary=99, named={"base": watched.base})
        watched.step()


def test_a_state_in_which_nothing_changes_is_not_watched(job: Job) -> None:
    """It was not trained meanwhile, which does not say that it will not be."""
    for _ in range(SUSPENDS):
        job.weight.sub_(1)
        job.boundary -= 1
        paths = job.step()
        assert "unread" not in paths
    job.write(WAYS["torch"], 5, 5)
    job.step()


def test_what_was_not_compared_is_not_trusted(disk: RamDisk) -> None:
    with disk.open_store("trusting") as store:
        job = Job(store, verify=False)
        for _ in range(SUSPENDS + 1):
            assert "unread" not in job.step()


def flip_at(snapshot: SnapshotFile, at: int) -> None:
    with snapshot.path.open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_damage_in_the_snapshot_is_still_found(watched: Job) -> None:
    watched.switch.suspend(boundary=50, named={"base": watched.base})
    snapshot = watched.switch.snapshot
    assert snapshot is not None
    (entry,) = snapshot.tensors
    at = snapshot.offsets[entry.sid] + BASE_BYTES // 2
    flip_at(snapshot, at)
    with pytest.raises(CorruptSnapshotError):
        watched.switch.resume()
    flip_at(snapshot, at)
    watched.switch.resume()
    assert np.array_equal(watched.base.numpy(), watched.expected)
    watched.step()


def test_two_switches_over_one_state_do_not_believe_each_other(watched: Job, disk: RamDisk) -> None:
    with disk.open_store("other") as store:
        other = Switch(CpuDevice(DeviceName("cpu", None)), store)
        for value in range(2):
            for _ in range(SUSPENDS):
                watched.step()
            watched.write(WAYS["C"], BASE_BYTES // 8, value)
            for boundary in range(SUSPENDS):
                watched.weight.add_(1)
                other.suspend(boundary=boundary)
                other.resume()
            watched.weight.sub_(SUSPENDS)
            watched.step()
