"""``python -m benchmarks.gpu_suite.environment DEVICE FILE``: what the suite runs with, as JSON.

Ends with exit code 1 if gpuslice is not the checkout's, or if the device does not work with torch at all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path

import psutil
import torch

import gpuslice.kernels
from gpuslice.kernels.nvml import read_driver


def is_simulated(device: torch.device) -> bool:
    """Whether a simulated CUDA runtime stands behind torch: nothing that it shows is a figure of speed."""
    return device.type == "cuda" and "simulated" in torch.cuda.get_device_name(device).lower()


def describe(device: torch.device) -> dict[str, object]:
    """Versions, the GPU, and what there is of memory."""
    driver = read_driver()
    found: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver.version or driver.problem,
        "cupy": _cupy(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "shm_free_bytes": shutil.disk_usage("/dev/shm").free,
        "simulated": is_simulated(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "gpus": len(driver.gpus)}
    return found


def _cupy() -> str | None:
    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def main(name: str, out: Path) -> int:
    device = torch.device(name)
    if int(torch.arange(1000, device=device).sum()) != 499_500:
        print(f"torch computes wrongly on {name}", file=sys.stderr)
        return 1
    out.write_text(json.dumps(describe(device), indent=1) + "\n", encoding="utf-8")
    found = Path(gpuslice.kernels.__file__ or "").resolve()
    checkout = Path(__file__).resolve().parents[2]
    if not found.is_relative_to(checkout):
        print(f"this gpuslice is the one in {found}, not the checkout's in {checkout}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
