"""Where packing begins to pay: ``python -m benchmarks.gpu_suite.threshold --out FILE [--device cuda:0]``.

Storages of 4 KiB to 4 MiB, copied packed and one by one. Where the two cross is what ``PACK_BYTES`` of the
copy pipeline should be.
"""

from __future__ import annotations

import argparse
import mmap
import sys
from pathlib import Path

import torch

from benchmarks.gpu_suite.measuring import MIB, Row, begin, fits, timed, write
from gpuslice.kernels import Device
from gpuslice.kernels.cuda.copies import GpuCopy
from gpuslice.kernels.cuda.engine import CudaEngine
from gpuslice.kernels.transfer import Pairs
from gpuslice.types import DeviceName

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB, 2 * MIB, 4 * MIB)


def rows_of(device: Device, engine: CudaEngine, size: int, count: int) -> list[Row]:
    """So many storages of a size, both ways, or why they were left out."""
    if not fits(device, 2 * count * size, count * size):  # the packed way stages them on the device
        return [{"bytes_each": size, "skipped": f"too little memory is free for {count} of them"}]
    made = [torch.full((size,), n % 251, dtype=torch.uint8, device=device.torch_device) for n in range(count)]
    pairs: Pairs = [(tensor.untyped_storage(), number * size) for number, tensor in enumerate(made)]
    arena = memoryview(mmap.mmap(-1, count * size))
    device.register(arena)
    try:
        return [row(engine, size, way, pairs, arena) for way in ("packed", "direct")]
    finally:
        device.unregister(arena)


def row(engine: CudaEngine, size: int, way: str, pairs: Pairs, arena: memoryview) -> Row:
    """One way out and in; what arrived is looked at."""

    def copy() -> GpuCopy:
        return GpuCopy(engine, pairs, arena, 4, pack_bytes=2 * size if way == "packed" else 0)

    out_s = timed(lambda: copy().out(None, None))
    for number, (_, offset) in enumerate(pairs):
        if arena[offset] != number % 251 or arena[offset + size - 1] != number % 251:
            raise AssertionError(f"storage {number} of {size} bytes, {way}, arrived with other bytes")
    in_s = timed(lambda: copy().back(None))
    return {"bytes_each": size, "storages": len(pairs), "way": way, "out_s": out_s, "in_s": in_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--count", type=int, default=500, help="storages of each size")
    arguments = parser.parse_args()
    device = begin(arguments.device)
    engine = CudaEngine(DeviceName.parse(arguments.device).index or 0)
    result: Row = {"rows": []}
    for size in SIZES:
        result["rows"] += rows_of(device, engine, size, arguments.count)  # type: ignore[operator]
        device.release_caches()
        write(arguments.out, result, device.torch_device)
    write(arguments.out, result | {"finished": True}, device.torch_device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
