"""GPUs as NVML would describe them."""

from __future__ import annotations

from gpuslice.kernels.nvml import Gpu


def gpu(index: int, **changes: object) -> Gpu:
    """A whole one."""
    values: dict[str, object] = {
        "index": index,
        "name": f"Fake GPU {index}",
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012}",
        "capability": "9.0",
        "total_bytes": 80 * 10**9,
        "used_bytes": 10**9,
        "compute_mode": "default",
    }
    return Gpu(**(values | changes))  # type: ignore[arg-type]


def mig(index: int, instance: int) -> Gpu:
    """An instance of a GPU that MIG divides."""
    uuid = f"MIG-00000000-0000-0000-{index:04}-{instance:012}"
    return gpu(index, uuid=uuid, compute_mode=None)
