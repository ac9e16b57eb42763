"""One of the two jobs: a state of its own that leaves the device and comes back as it is told.

Started as ``python -m benchmarks.duplex_swap.job STATE DIRECTORY NAME OTHER PORTION_BYTES``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.states import STATE_BYTES, STATES
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.swap_endpoints import Successor, SwapListener
from gpuslice.checkpoint.switch.swap_protocol import Terms
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

PATIENCE_S = 60.0


def main() -> None:
    state_name, directory, name, other, portion = sys.argv[1:]
    hide_imports()
    state = STATES[state_name]()
    disk = RamDisk(Path(directory) / "ramdisk", 6 * STATE_BYTES + 2**28)
    with disk.open_store(name) as store:
        switch = Switch(open_device(DeviceName("cpu", None)), store)
        boundary = 0

        def suspend(successor: Successor | None = None) -> None:
            nonlocal boundary
            boundary += 1
            switch.suspend(boundary=boundary, successor=successor)

        def leave() -> None:
            there = disk.directory / f"{other}.r0"
            suspend(Successor(there, Terms(name, other, 1, "cpu"), portion_bytes=int(portion)))

        def arrive() -> None:
            listener = SwapListener(store.directory, Terms(other, name, 1, "cpu"), portion_bytes=int(portion))
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
