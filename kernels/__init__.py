"""What touches device memory: the ``Device`` interface and its CPU, CUDA and null implementations.

The names load on first use (PEP 562): routes are chosen and machines examined without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device import Device, DeviceMemory, Hold, Way
    from .opening import open_device

__all__ = ["Device", "DeviceMemory", "Hold", "Way", "open_device"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gpuslice.kernels' has no attribute {name!r}")
    module = "opening" if name == "open_device" else "device"
    return getattr(import_module(f"{__name__}.{module}"), name)
