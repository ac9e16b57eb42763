"""In place of the simulation's module, on a real GPU: what tests ask of both."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pynvml


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime that torch has loaded."""
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    return ctypes.CDLL(str(runtime_path()))


def runtime_path() -> Path:
    """Of the runtime library of this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return Path(next(line.split(maxsplit=5)[5] for line in lines if "/libcudart.so" in line))


def forget_faults() -> None:
    """There are none."""


def used_bytes(physical: int = 0) -> int:
    """Memory of a GPU that is taken, by whomever."""
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(physical)).used)
