"""One of the two jobs: a state of its own that leaves the device and comes back as it is told.

Started as ``python -m benchmarks.duplex_swap.job STATE DEVICE DIRECTORY NAME OTHER PORTION_BYTES``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.states import STATE_BYTES, STATES
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.swap_endpoints import Successor, SwapListener
from gpuslice.checkpoint.switch.swap_protocol import Terms
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

PATIENCE_S = 60.0


class LargeTensors:
    """Tensors of 32 MiB on a device, of which training changes every byte's word; it compares them first."""

    def __init__(self, device: torch.device) -> None:
        self.nbytes = max(4 << 20, STATE_BYTES)
        size = min(self.nbytes // 4, 32 << 20)
        count = self.nbytes // size
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
    state_name, device_name, directory, name, other, portion = sys.argv[1:]
    hide_imports()
    device = open_device(DeviceName.parse(device_name))
    state = LargeTensors(device.torch_device) if state_name == "large" else STATES[state_name]()
    disk = RamDisk(Path(directory) / "ramdisk", 6 * STATE_BYTES + 2**28)
    with disk.open_store(name) as store:
        switch = Switch(device, store)
        boundary = 0

        def suspend(successor: Successor | None = None) -> None:
            nonlocal boundary
            boundary += 1
            switch.suspend(boundary=boundary, successor=successor)

        def leave() -> None:
            there = disk.directory / f"{other}.r0"
            suspend(Successor(there, Terms(name, other, 1, device_name), portion_bytes=int(portion)))

        def arrive() -> None:
            terms = Terms(other, name, 1, device_name)
            listener = SwapListener(store.directory, terms, portion_bytes=int(portion))
            print("open", flush=True)
            successor = listener.await_predecessor(PATIENCE_S)
            assert successor is not None
            switch.resume(swap=successor)
            listener.close()

        verbs: dict[str, Callable[[], object]] = {
            "train": state.train,
            "suspend": suspend,
            "resume": switch.resume,
            "leave": leave,
            "arrive": arrive,
        }
        print(os.getpid(), state.nbytes, flush=True)
        for line in sys.stdin:
            verbs[line.strip()]()
            print("done", flush=True)


if __name__ == "__main__":
    main()
