"""One of the two jobs of ``swap.py``: a state of its own that leaves the device and comes back as it is told.

Started as ``python -m benchmarks.gpu_suite.swap_job BYTES DEVICE DIRECTORY NAME``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName


class LargeTensors:
    """Tensors of 32 MiB on a device, of which training changes every byte's word; it compares them first."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        size = min(nbytes // 4, 32 << 20)
        count = nbytes // size
        self.nbytes = count * size
        self._tensors = [torch.full((size // 4,), n, dtype=torch.int32, device=device) for n in range(count)]
        self._trained = 0

    def train(self) -> None:
        for number, tensor in enumerate(self._tensors):
            if not bool((tensor == number + self._trained).all()):
                raise AssertionError(f"tensor {number} came back with other bytes")
            tensor.add_(1)
        self._trained += 1
        if self._tensors[0].is_cuda:
            torch.cuda.synchronize()


def main() -> None:
    size, device_name, directory, name = sys.argv[1:]
    hide_imports()
    device = open_device(DeviceName.parse(device_name))
    state = LargeTensors(device.torch_device, int(size))
    disk = RamDisk(Path(directory) / "ramdisk", 6 * int(size) + 2**28)
    with disk.open_store(name) as store:
        switch = Switch(device, store)
        boundary = 0

        def suspend() -> None:
            nonlocal boundary
            boundary += 1
            switch.suspend(boundary=boundary)

        verbs: dict[str, Callable[[], object]] = {
            "train": state.train,
            "suspend": suspend,
            "resume": switch.resume,
        }
        print(state.nbytes, flush=True)
        for line in sys.stdin:
            verbs[line.strip()]()
            print("done", flush=True)


if __name__ == "__main__":
    main()
