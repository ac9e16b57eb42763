"""The slots of the host, ``cpu:0`` and so on. Needs no torch: command lines are checked with it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.types import DeviceName


def check_slot(name: DeviceName, slots: int, cores: int | None = None) -> int:
    """Into how many slots the host is divided, with ``name`` being one of them if it is ``cpu:N``.

    Parameters
    ----------
    slots
        As the settings say; 0 means one per core.
    cores
        That this process may use; asked for if not given.

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
    """Which of ``cores`` are those of slot ``index`` of ``slots``.

    All slots have the same number of cores. More slots than cores share cores: that is what a user asks for
    who wants to try things out.
    """
    width = max(1, len(cores) // slots)
    first = index * width % len(cores)
    return frozenset(cores[first : first + width])
