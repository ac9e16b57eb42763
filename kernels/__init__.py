"""Access to device memory: the ``Device`` interface and its CPU, CUDA and null implementations.

The names load on first use (PEP 562): routes are chosen and machines examined without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.types import DeviceName

if TYPE_CHECKING:
    from .device import Device, DeviceMemory, Hold, Way

__all__ = ["Device", "DeviceMemory", "Hold", "Way", "open_device"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gpuslice.kernels' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.device"), name)


def open_device(name: DeviceName, *, cpu_slots: int = 0) -> Device:
    """Return the device with that name. Only the modules that this device needs are imported.

    Parameters
    ----------
    cpu_slots
        Into how many slots the host's cores are divided for ``cpu:N``; 0 means one per core.

    Raises
    ------
    EnvironmentUnusableError
        If this machine does not have it.
    """
    if name.kind == "cpu":
        from .host.device import CpuDevice

        return CpuDevice(name, slots=cpu_slots)
    if name.kind == "cuda":
        from .cuda.device import CudaDevice

        return CudaDevice(name)
    if name.kind == "null":
        from .null import NullDevice

        return NullDevice(name)
    raise EnvironmentUnusableError(f"no device of kind {name.kind!r} is known", "use cpu or cuda")
