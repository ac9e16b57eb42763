"""``python -m gpuslice.launch.selftest DEVICE ...``: move a few tensors off each device and back.

It prints one JSON object, device -> an `Outcome`. It runs in a process of its own, because it imports torch
and makes CUDA contexts.
"""

from __future__ import annotations

import json
import mmap
import sys
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch

from gpuslice.errors import GpusliceError
from gpuslice.kernels import open_device
from gpuslice.types import DeviceName

#: Sizes: tiny, odd, and large enough for a mapping of its own.
_SIZES = (1, 4097, 3 << 20)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the self-test: the problem (empty: none), and why copies take slower paths."""

    problem: str
    slower: tuple[str, ...] = ()


def examine(name: str) -> Outcome:
    """Move a few tensors from a device to an arena and back, as a suspend does. Return the outcome."""
    try:
        device = open_device(DeviceName.parse(name))
        tensors = [torch.arange(n, device=device.torch_device).to(torch.uint8) for n in _SIZES]
        expected = [tensor.cpu().clone() for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        sizes = [storage.nbytes() for storage in storages]
        pairs = list(zip(storages, accumulate(sizes, initial=0), strict=False))
        arena = memoryview(mmap.mmap(-1, sum(sizes)))
        device.register(arena)
        transfer = device.copy_out(pairs, arena)
        device.free(storages)
        if any(storage.nbytes() for storage in storages):
            return Outcome("freed tensors kept their memory")
        device.reserve(list(zip(storages, sizes, strict=True)))
        transfer += device.copy_in(pairs, arena)
        device.unregister(arena)
    except (GpusliceError, RuntimeError) as error:
        return Outcome(f"{type(error).__name__}: {error}")
    same = all(torch.equal(tensor.cpu(), bytes_) for tensor, bytes_ in zip(tensors, expected, strict=True))
    return Outcome("" if same else "tensors came back with other bytes", transfer.fallbacks)


if __name__ == "__main__":
    print(json.dumps({name: asdict(examine(name)) for name in sys.argv[1:]}))
