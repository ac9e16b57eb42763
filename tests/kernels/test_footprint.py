"""Memory that is faulted in where storages lay, before they come back."""

from __future__ import annotations

import errno
import os
import platform

import pytest
import torch

from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels import footprint
from gpuslice.kernels.cpu import CpuDevice
from gpuslice.kernels.footprint import Footprint
from gpuslice.kernels.host import resident_anonymous_bytes
from gpuslice.types import DeviceName

MIB = 1 << 20
SIZES = [8 * MIB + 100] * 8
TOTAL = sum(SIZES)

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(DeviceName("cpu", None))


@pytest.fixture
def storages(device: CpuDevice) -> list[torch.UntypedStorage]:
    """Back from a suspend, so that they lie in the heap, where a footprint of theirs was noted."""
    found = [torch.UntypedStorage(nbytes).fill_(3) for nbytes in SIZES]  # type: ignore[no-untyped-call]
    leave(device, found)
    device.reserve(list(zip(found, SIZES, strict=True)))
    for storage in found:
        storage.fill_(5)
    return found


def leave(device: CpuDevice, storages: list[torch.UntypedStorage]) -> None:
    device.free(storages)
    device.release_caches()


def test_memory_is_there_before_it_is_asked_for(
    device: CpuDevice, storages: list[torch.UntypedStorage]
) -> None:
    leave(device, storages)
    parked_bytes = resident_anonymous_bytes()
    device._footprint.fault_in(TOTAL, 2)
    assert resident_anonymous_bytes() - parked_bytes > 0.9 * TOTAL


def test_what_comes_back_takes_that_memory_and_no_other(
    device: CpuDevice, storages: list[torch.UntypedStorage]
) -> None:
    arena = memoryview(os.urandom(TOTAL))
    leave(device, storages)
    parked_bytes = resident_anonymous_bytes()
    device.reserve(list(zip(storages, SIZES, strict=True)))
    pairs = list(zip(storages, range(0, TOTAL, SIZES[0]), strict=True))
    device.copy_in(pairs, arena)
    assert resident_anonymous_bytes() - parked_bytes < 1.5 * TOTAL
    for storage, offset in pairs:
        held = torch.empty(0, dtype=torch.uint8).set_(storage)
        assert memoryview(held.numpy()) == arena[offset : offset + storage.nbytes()]


def test_no_more_is_faulted_in_than_is_needed(
    device: CpuDevice, storages: list[torch.UntypedStorage]
) -> None:
    leave(device, storages)
    parked_bytes = resident_anonymous_bytes()
    device._footprint.fault_in(TOTAL - 1, 2)
    assert resident_anonymous_bytes() - parked_bytes < 0.1 * TOTAL


def test_without_pages_nothing_is_taken(
    device: CpuDevice, storages: list[torch.UntypedStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(device, storages)

    def refuse(address: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "no pages")

    with monkeypatch.context() as patch:
        patch.setattr(footprint, "populate", refuse)
        with pytest.raises(DeviceMemoryError, match=f"take back {TOTAL} bytes"):
            device.reserve(list(zip(storages, SIZES, strict=True)))
    assert not any(storage.nbytes() for storage in storages)
    device.reserve(list(zip(storages, SIZES, strict=True)))
    assert [storage.nbytes() for storage in storages] == SIZES


def test_only_what_was_made_present_is_not_fresh(
    device: CpuDevice, storages: list[torch.UntypedStorage]
) -> None:
    places = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
    found = Footprint()
    found.note(storages)
    assert found.fresh(places) == places
    leave(device, storages)
    found.fault_in(TOTAL, 1)
    outside = (4096, 5)
    across = (max(places)[0], 2 * TOTAL)
    assert found.fresh([*places, outside, across]) == [outside, across]
