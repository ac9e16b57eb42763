"""Suspends whose bytes go the way they go on a GPU: packed, summed there, and checked on their way back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpuslice.checkpoint.format.reader import open_snapshot
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import CorruptSnapshotError
from gpuslice.kernels.cuda.copies import GpuCopy
from gpuslice.kernels.cuda.copy_plan import PACK_BYTES
from gpuslice.kernels.host.device import CpuDevice
from gpuslice.kernels.transfer import Checksums, Inspector, Pairs, Transfer
from gpuslice.types import DeviceName

from ..fakes.host_engine import HostEngine, build_kernels
from .harness import SpyGate, digest

MIB = 1 << 20
#: Whole chunks, an odd end that needs padding, and small ones of which some are scalars.
SIZES = (8 * MIB, 5 * MIB + 3, PACK_BYTES, 1000, 4, 70_001, 4)
LARGE_BYTES = sum(size for size in SIZES if size >= PACK_BYTES)
SMALL_BYTES = sum(SIZES) - LARGE_BYTES


class LikeGpu(CpuDevice):
    """The host, as the owner of a few tensors only; copies by a GPU's pipeline, or by the host's."""

    def __init__(self, tensors: Sequence[torch.Tensor], engine: HostEngine) -> None:
        super().__init__(DeviceName("cpu", None))
        self._own = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._engine: Any = engine
        self.by_host = False

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._own

    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        if self.by_host:
            return super().copy_out(pairs, arena, inspect, checksums)
        return GpuCopy(self._engine, pairs, arena, 2).out(inspect, checksums)

    def copy_in(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        return GpuCopy(self._engine, pairs, arena, 2).back(inspect, checksums)


class Job:
    """Tensors that do not change by themselves, and a switch that moves them and nothing else."""

    def __init__(self, directory: Path, engine: HostEngine) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in SIZES]
        self.device = LikeGpu(self.tensors, engine)
        self.store = RamDisk(directory, 128 * MIB).open_store(None)
        self.switch = Switch(self.device, self.store, gate=SpyGate())

    def round_trip(self) -> SwitchRecord:
        """Suspend and resume, exactly; the snapshot is whole in between."""
        before = digest(*self.tensors)
        self.switch.suspend(boundary=1)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in self.tensors)
        assert self.switch.snapshot is not None
        with open_snapshot(self.switch.snapshot.path) as snapshot:
            snapshot.verify()
        record = self.switch.resume()
        assert digest(*self.tensors) == before
        return record


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def job(shm: Path, kernels: ctypes.CDLL) -> Iterator[Job]:
    made = Job(shm / "pipeline", HostEngine(kernels))
    with made.store:
        yield made


def test_the_record_says_which_way_the_bytes_went(job: Job) -> None:
    record = job.round_trip()
    assert record.copy_out.paths == record.copy_in.paths == {"packed": SMALL_BYTES, "direct": LARGE_BYTES}
    assert (record.copy_out.launches, record.copy_in.launches) == (2, 2)
    row = record.as_dict()
    assert row["copy_in"] == {"paths": record.copy_in.paths, "copies": 4, "launches": 2, "fallbacks": ()}


def test_only_changed_chunks_are_copied(job: Job) -> None:
    assert job.round_trip().bytes_unchanged == 0
    assert job.round_trip().bytes_unchanged == LARGE_BYTES
    job.tensors[1][5 * MIB + 2] ^= 1
    record = job.round_trip()
    assert record.bytes_unchanged == LARGE_BYTES - MIB - 3
    assert record.copy_out.paths["direct"] == MIB + 3
    assert job.round_trip().bytes_unchanged == LARGE_BYTES


def test_a_gpus_checksums_are_the_hosts(job: Job) -> None:
    job.round_trip()
    job.device.by_host = True
    assert job.round_trip().bytes_unchanged == sum(SIZES)
    job.device.by_host = False
    assert job.round_trip().bytes_unchanged == LARGE_BYTES


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_a_damaged_byte_is_found_on_its_way_back(job: Job, number: int) -> None:
    job.switch.suspend(boundary=1)
    snapshot = job.switch.snapshot
    assert snapshot is not None
    order = [spec.nbytes for spec in snapshot.storages]
    at = snapshot.offsets[order.index(SIZES[number])] + SIZES[number] - 1
    with snapshot.path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptSnapshotError, match="is damaged"):
        job.switch.resume()
    assert job.switch.suspended
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in job.tensors)
    with snapshot.path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))
    job.switch.resume()
