"""A device by its name; imports only what that device needs."""

from __future__ import annotations

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.types import DeviceName

from .device import Device


def open_device(name: DeviceName, *, cpu_slots: int = 0) -> Device:
    """The device of that name.

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
    if name.further:
        from .cuda.device_group import CudaGroup

        return CudaGroup(name)
    if name.kind == "cuda":
        from .cuda.device import CudaDevice

        return CudaDevice(name)
    if name.kind == "null":
        from .null import NullDevice

        return NullDevice(name)
    raise EnvironmentUnusableError(f"no device of kind {name.kind!r} is known", "use cpu or cuda")
