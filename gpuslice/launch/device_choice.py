"""Choose the device of a job: the one in the settings, or the one that its script uses. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.types import DeviceName, Route

HOST = DeviceName("cpu", None)
FIRST_GPU = DeviceName("cuda", 0)


def named_device(device: str, route: Route) -> DeviceName | None:
    """Return the device that the settings name or imply; None if it depends on what the script uses.

    Parameters
    ----------
    device
        ``cpu``, ``cpu:1``, ``cuda:0``, or empty.
    route
        A route that exists on GPUs only implies the first GPU.

    Raises
    ------
    UsageError
        If ``device`` is no device.
    """
    if device:
        return DeviceName.parse(device, several=True)
    return FIRST_GPU if route.needs_gpu else None


def found_device(current: int, allocated_bytes: Sequence[int]) -> DeviceName:
    """Return the device of a script without a named one: the GPU that holds most of its memory.

    Parameters
    ----------
    current
        Index of torch's current GPU; the choice between equals.
    allocated_bytes
        Live bytes of torch's allocator on each GPU, by index.

    Returns
    -------
    DeviceName
        ``cpu`` (the whole host) if no GPU holds anything.
    """
    most_bytes = max(allocated_bytes, default=0)
    if most_bytes == 0:
        return HOST
    if current < len(allocated_bytes) and allocated_bytes[current] == most_bytes:
        return DeviceName("cuda", current)
    return DeviceName("cuda", list(allocated_bytes).index(most_bytes))
