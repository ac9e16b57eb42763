"""One rank: a state of its own, suspended and resumed, or only copied, when it is told to.

Started as ``python -m benchmarks.parallel_restore.rank STATE DIRECTORY RANK``; its device is the CPU slot of
that X"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from ctypes import addressof, c_char, memmove
from pathlib import Path

from benchmarks.states import CHUNK_BYTES, STATE_BYTES, STATES
from gpuslice.checkpoint.heap import hide_imports
from gpuslice.checkpoint.ramdisk import RamDisk
from gpuslice.checkpoint.switch import Switch
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName


class Copy:
    """As many bytes from a faulted mapping of tmpfs into memory that is there; no tensor for a sweep."""

    def __init__(self, nbytes: int, path: Path) -> None:
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            source = mmap.mmap(file.fileno(), nbytes)
        self._ends = [c_char.from_buffer(mapping) for mapping in (mmap.mmap(-1, nbytes), source)]
        self._starts = range(0, nbytes, CHUNK_BYTES)
        self._nbytes = nbytes

    def __call__(self) -> None:
        target, source = map(addressof, self._ends)
        for start in self._starts:
            memmove(target + start, source + start, min(CHUNK_BYTES, self._nbytes - start))


def main() -> None:
    name, directory, index = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    hide_imports()
    device = open_device(DeviceName("cpu", index))
    device.pin()
    state = STATES[name]()
    copy = Copy(state.nbytes, directory / f"copied{index}")
    with RamDisk(directory / "ramdisk", 8 * STATE_BYTES + 2**28).open_store("bench", index) as store:
        switch = Switch(device, store)
        boundary = 0

        def suspend() -> None:
            nonlocal boundary
            boundary += 1
            state.train()
            switch.suspend(boundary=boundary)

        verbs: dict[str, Callable[[], object]] = {
            "suspend": suspend,
            "resume": switch.resume,
            "copy": copy,
        }
        for _ in range(2):
            suspend()
            switch.resume()
        copy()
        print("ready", flush=True)
        for line in sys.stdin:
            began_s = time.perf_counter()
            verbs[line.strip()]()
            print(time.perf_counter() - began_s, flush=True)


if __name__ == "__main__":
    main()
