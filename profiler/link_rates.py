"""``python -m gpuslice.profiler.link_rates cuda:0 ...``: measure page-locked copies and page-locking.

Prints one JSON object. It runs in a process of its own, because it imports torch and makes CUDA contexts.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from itertools import permutations

import torch

from gpuslice.errors import GpusliceError
from gpuslice.kernels.cuda.device import CudaDevice
from gpuslice.types import DeviceName

#: Bytes of a copy: enough to hide its fixed cost, few enough for `gpuslice doctor`.
_BYTES = 256 << 20
_ROUNDS = 5


def rates(name: str) -> dict[str, object]:
    """Return one GPU's copy rates in 1e9 bytes per second, and the seconds to page-lock 1e9 bytes."""
    device = CudaDevice(DeviceName.parse(name))
    device.pin()
    nbytes = _room(device.torch_device)
    arena = memoryview(mmap.mmap(-1, nbytes))
    host = torch.frombuffer(arena, dtype=torch.uint8)
    host.zero_()  # otherwise faulting pages in would count as locking
    there = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
    began_s = time.perf_counter()
    locked = device.register(arena)
    lock_s = time.perf_counter() - began_s
    try:
        out_s = _best_s(lambda: host.copy_(there, non_blocking=True), device.torch_device)
        in_s = _best_s(lambda: there.copy_(host, non_blocking=True), device.torch_device)
    finally:
        device.unregister(arena)
    return {
        "out_gb_per_s": nbytes / out_s / 1e9,
        "in_gb_per_s": nbytes / in_s / 1e9,
        "page_lock_s_per_gb": lock_s / nbytes * 1e9 if locked else None,
    }


def peer(source: str, target: str) -> dict[str, object]:
    """Return whether one GPU reaches another's memory directly, and how fast it copies there."""
    here, there = torch.device(source), torch.device(target)
    nbytes = min(_room(here), _room(there))
    gone = torch.zeros(nbytes, dtype=torch.uint8, device=here)
    arrived = torch.empty(nbytes, dtype=torch.uint8, device=there)
    seconds = _best_s(lambda: arrived.copy_(gone, non_blocking=True), here, there)
    return {
        "source": source,
        "target": target,
        "direct": bool(torch.cuda.can_device_access_peer(here, there)),
        "gb_per_s": nbytes / seconds / 1e9,
    }


def _room(device: torch.device) -> int:
    """Return how many bytes to copy: at most a quarter of free memory, as other jobs may be training."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return max(1 << 20, min(_BYTES, free_bytes // 4 // mmap.PAGESIZE * mmap.PAGESIZE))


def _best_s(copy: Callable[[], object], *devices: torch.device) -> float:
    """Return the least time of a copy."""

    def once() -> float:
        began_s = time.perf_counter()
        copy()
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    return min([once() for _ in range(_ROUNDS + 1)][1:])


def measure(names: list[str]) -> dict[str, object]:
    """Return all measurements. Failures are listed beside them."""
    found: dict[str, object] = {}
    peers: list[dict[str, object]] = []
    problems: list[str] = []
    for name in names:
        try:
            found[name] = rates(name)
        except (GpusliceError, RuntimeError) as error:
            problems.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
    for source, target in permutations(found, 2):
        try:
            peers.append(peer(source, target))
        except RuntimeError as error:
            problems.append(f"{source} to {target}: {error}".splitlines()[0])
        torch.cuda.empty_cache()
    return {"rates": found, "peers": peers, "problems": problems}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:])))
