"""A state that just fits on its GPU fits there again: it does not come back in more segments than it had."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cudasim
import pytest
import torch

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import DeviceMemoryError
from gpuslice.kernels import open_device
from gpuslice.kernels.cuda import allocator_memory
from gpuslice.types import DeviceName

pytestmark = pytest.mark.whole_gpu

MIB = 1 << 20
#: In a segment of its own each would be rounded up to 12 MiB.
NBYTES, COUNT, SPARE_BYTES = 11 * MIB + 512, 90, 16 * MIB


@contextmanager
def taken_but(left_bytes: int) -> Iterator[None]:
    """Somebody else has all memory of the GPU but so much."""
    address, free_bytes = ctypes.c_void_p(), torch.cuda.mem_get_info(0)[0]
    runtime = cudasim.runtime()
    code = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(free_bytes - left_bytes))
    assert code == 0, code
    try:
        yield
    finally:
        assert runtime.cudaFree(address) == 0


@pytest.mark.parametrize("together", [True, False], ids=["one segment", "each its own"])
def test_many_large_storages_fit_where_they_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    torch.empty(COUNT * NBYTES, dtype=torch.uint8, device="cuda:0")  # a segment that they then share
    tensors = [torch.full((NBYTES,), index, dtype=torch.uint8, device="cuda:0") for index in range(COUNT)]
    with RamDisk(tmp_path / "ramdisk", 2 << 30).open_store(None) as store:
        switch = Switch(open_device(DeviceName("cuda", 0)), store)
        switch.suspend(boundary=1)
        with taken_but(COUNT * NBYTES + SPARE_BYTES):
            if together:
                switch.resume()
            else:  # the spare memory says nothing if they fitted without room made for them
                with monkeypatch.context() as patch:
                    patch.setattr(allocator_memory, "make_room", lambda nbytes, device: None)
                    with pytest.raises(DeviceMemoryError):
                        switch.resume()
        if not together:
            switch.resume()
        assert all(bool((tensor == index).all()) for index, tensor in enumerate(tensors))
