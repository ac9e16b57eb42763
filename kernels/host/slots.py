"""The slots of the host, ``cpu:0`` and so on. Needs no torch: command lines are checked with this module."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.types import DeviceName


def check_slot(name: DeviceName, slots: int, cores: int | None = None) -> int:
    """Return into how many slots the host is divided. A ``name`` like ``cpu:N`` must be one of them.

    Parameters
    ----------
    slots
        The number in the settings; 0 means one slot per core.
    cores
        Number of cores that this process may use; looked up if not given.

    Raises
    ------
    EnvironmentUnusableError
        If the host has no such slot.
    """
    slots = slots or cores or len(os.sched_getaffinity(0))
    if name.kind == "cpu" and name.index is not None and name.index >= slots:
        last = f"cpu:0 to cpu:{slots - 1}" if slots > 1 else "cpu:0"
        raise EnvironmentUnusableError(
            f"{name} does not exist: the host is divided into {slots} slot{'s' if slots > 1 else ''}",
            f"use {last}",
        )
    return slots


def slot_cores(index: int, slots: int, cores: Sequence[int]) -> frozenset[int]:
    """Return the cores of slot ``index``, out of ``slots`` slots of equal size.

    If there are more slots than cores, slots share cores: users ask for that to try things out.
    """
    width = max(1, len(cores) // slots)
    first = index * width % len(cores)
    return frozenset(cores[first : first + width])
