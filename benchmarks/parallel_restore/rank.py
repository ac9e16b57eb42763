"""One rank: a state of its own, suspended and resumed, or only copied, when it is told to.

Started as ``python -m benchmarks.parallel_restore.rank STATE DIRECTORY RANK``; its device is the CPU slot of
that number. Every line on its standard input, ``train``, ``suspend``, ``resume`` or ``copy``, is answered by
how many seconds that took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.states import STATE_BYTES, STATES, Limit
from gpuslice.checkpoint.discover.heap import hide_imports
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName


def main() -> None:
    name, directory, index = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    hide_imports()
    device = open_device(DeviceName("cpu", index))
    device.pin()
    state = STATES[name]()
    own = directory / str(index)
    own.mkdir()
    copy = Limit([state.nbytes], own, outward=False, threads=1)
    with RamDisk(directory / "ramdisk", 8 * STATE_BYTES + 2**28).open_store("bench", index) as store:
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
            "copy": copy,
        }
        for _ in range(2):
            for verb in verbs.values():
                verb()
        print("ready", flush=True)
        for line in sys.stdin:
            began_s = time.perf_counter()
            verbs[line.strip()]()
            print(time.perf_counter() - began_s, flush=True)


if __name__ == "__main__":
    main()
