"""What the suite's measurements share: room, medians, and the rows of their results."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from benchmarks.gpu_suite.environment import is_simulated
from benchmarks.states import median
from gpuslice.kernels import Device, open_device
from gpuslice.types import DeviceName

GB = 10**9
MIB = 1 << 20
ROUNDS = 5
SHM = Path("/dev/shm")
Row = dict[str, object]
#: How the keys of measured times and rates end. A simulated runtime has none that mean anything.
_FIGURES = ("_s", "_per_s", "_of_peak")


def begin(name: str) -> Device:
    """The device, with CUDA begun: before, it would tell nothing of its memory."""
    device = open_device(DeviceName.parse(name))
    device.pin()
    torch.empty(1, device=device.torch_device)
    return device


def timed(work: Callable[[], object]) -> float:
    """Median seconds of `ROUNDS` calls after one that does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return median(times[1:])


def fits(device: Device, device_bytes: int, host_bytes: int) -> bool:
    """Whether so much is free on the device, and on the host and its tmpfs, with a quarter to spare."""
    memory = device.memory()
    on_device = memory.total_bytes - memory.used_bytes
    on_host = min(shutil.disk_usage(SHM).free, psutil.virtual_memory().available // 2)
    return device_bytes * 1.25 < on_device and host_bytes * 1.25 < on_host


def write(path: Path, result: Row, device: torch.device) -> None:
    """After every row, so that a run that is cut off leaves what it has."""
    path.write_text(as_json({"finished": False} | result, device) + "\n", encoding="utf-8")


def as_json(result: Row, device: torch.device) -> str:
    """A simulated runtime's result says so and holds no times, so that nobody takes them for figures."""
    simulated = is_simulated(device)
    return json.dumps({"simulated": simulated, "result": _without_figures(result) if simulated else result})


def _without_figures(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_figures(item) for key, item in value.items() if not str(key).endswith(_FIGURES)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_figures(item) for item in value]
    return value
