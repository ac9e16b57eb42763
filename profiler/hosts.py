"""Read the instruments of the host's slots through psutil. A slot is a set of cores."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from gpuslice.kernels.host.slots import check_slot, slot_cores
from gpuslice.types import DeviceName

from .devices import MIB, DeviceProcess, MissingValues, Reading

_ONLY_GPUS = ("power_draw", "power_limit", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx", "mig", "mps")


class HostReader:
    """Reads the slots ``cpu:0``, ``cpu:1``, … of this host.

    Parameters
    ----------
    slots
        Into how many the cores are divided; 0 means one per core.
    processes
        True to list processes that are pinned to a slot, which takes some milliseconds of a core.
    """

    def __init__(self, slots: int = 0, *, processes: bool = True) -> None:
        self._processes = processes
        self._all = tuple(sorted(os.sched_getaffinity(0)))
        count = check_slot(DeviceName("cpu", None), slots, len(self._all))
        self._slots = [slot_cores(index, count, self._all) for index in range(count)]
        # Not psutil.cpu_percent, which keeps its last reading per thread.
        self._times = psutil.cpu_times(percpu=True)

    def read(self) -> list[Reading]:
        before, self._times = self._times, psutil.cpu_times(percpu=True)
        busy = [_busy_percent(*pair) for pair in zip(before, self._times, strict=False)]
        memory = psutil.virtual_memory()
        return [
            self._read(index, cores, [busy[core] for core in cores if core < len(busy)], memory)
            for index, cores in enumerate(self._slots)
        ]

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _read(self, index: int, cores: frozenset[int], busy: Sequence[float], memory: Any) -> Reading:
        missing = MissingValues()
        for field in _ONLY_GPUS:
            missing.note(field, "only GPUs have it")
        for field in ("temperature", "clock_memory", "throttle_reasons"):
            missing.note(field, "the host does not tell it by core")
        clock = _clock_mhz(cores)
        if clock is None:
            missing.note("clock_sm", "the host does not tell it")
        if not busy:
            missing.note("utilization", "the host does not tell it by core")
        return Reading(
            index=index,
            device=f"cpu:{index}",
            name=f"{platform.machine()}, {'cores' if len(cores) > 1 else 'core'} {_ranges(cores)}",
            utilization=sum(busy) / len(busy) if busy else None,
            memory_used=(memory.total - memory.available) / MIB,
            memory_total=memory.total / MIB,
            clock_sm=clock,
            processes=tuple(_pinned(cores)) if self._processes and len(cores) < len(self._all) else (),
            unavailable=missing.reasons,
        )


def _busy_percent(before: Any, after: Any) -> float:
    """Return the per cent of time, between two ``cpu_times`` of a core, in which it worked."""
    spent = [later - earlier for earlier, later in zip(before, after, strict=True)]
    # Guests' time is part of user's and nice's.
    total_s = sum(spent) - sum(getattr(after, n, 0) - getattr(before, n, 0) for n in ("guest", "guest_nice"))
    idle_s = sum(getattr(after, n, 0) - getattr(before, n, 0) for n in ("idle", "iowait"))
    return 100 * min(1.0, max(0.0, 1 - idle_s / total_s)) if total_s > 0 else 0.0


def _clock_mhz(cores: frozenset[int]) -> float | None:
    """Return the mean clock of ``cores``; None if it is unknown."""
    try:
        clocks = psutil.cpu_freq(percpu=True)
    except (OSError, NotImplementedError):
        return None
    found = [clocks[core].current for core in cores if core < len(clocks)]
    return sum(found) / len(found) if found else None


def _pinned(cores: frozenset[int]) -> Iterator[DeviceProcess]:
    """Yield the processes that may run on no other cores than ``cores``."""
    for process in psutil.process_iter(["username", "name", "memory_info", "cpu_affinity"]):
        found = process.info
        cpus, memory = found["cpu_affinity"], found["memory_info"]  # None: other users' may be hidden
        if cpus and cores.issuperset(cpus) and memory and memory.rss:
            yield DeviceProcess(process.pid, found["username"], found["name"], memory.rss / MIB)


def _ranges(cores: frozenset[int]) -> str:
    """Return cores as text: ``0-3,8`` for 0, 1, 2, 3, 8."""
    pieces: list[list[int]] = []
    for core in sorted(cores):
        if pieces and pieces[-1][-1] == core - 1:
            pieces[-1].append(core)
        else:
            pieces.append([core])
    return ",".join(str(piece[0]) if len(piece) == 1 else f"{piece[0]}-{piece[-1]}" for piece in pieces)
