"""Readings of devices: one per GPU or host slot, with gpustat's keys.

docs/json.md lists keys, types and units. A value that an instrument does not give is None, and
``unavailable`` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

_T = TypeVar("_T")
MIB = 1 << 20
_KEYS = {
    "temperature": "temperature.gpu",
    "utilization": "utilization.gpu",
    "power_draw": "power.draw",
    "power_limit": "enforced.power.limit",
    "memory_used": "memory.used",
    "memory_total": "memory.total",
    "clock_sm": "clocks.sm",
    "clock_memory": "clocks.mem",
    "pcie_tx": "pcie.tx",
    "pcie_rx": "pcie.rx",
    "nvlink_tx": "nvlink.tx",
    "nvlink_rx": "nvlink.rx",
    "throttle_reasons": "throttle.reasons",
    "mig": "mig.mode",
}


class DeviceProcess(msgspec.Struct, frozen=True):
    """A process on a device; ``gpu_memory_usage`` in MiB."""

    pid: int
    username: str | None
    command: str | None
    gpu_memory_usage: float | None


class Reading(msgspec.Struct, frozen=True, kw_only=True, rename=_KEYS):
    """The values of a device's instruments at one moment.

    Attributes
    ----------
    device
        The name that jobs use: ``cuda:0``, ``cpu:1``. GPUs have their NVML number.
    temperature
        °C.
    utilization
        Per cent of the time since the last reading in which it worked.
    power_draw, power_limit
        W.
    memory_used, memory_total
        MiB; of a host slot, the host's.
    clock_sm, clock_memory
        MHz; of a host slot, its cores' mean.
    pcie_tx, pcie_rx, nvlink_tx, nvlink_rx
        KB/s, and for NVLink KiB/s since the last reading.
    throttle_reasons
        Why the clocks are not at their highest.
    mig, mps
        True if the GPU is divided by MIG; True if processes of an MPS server are on it.
    unavailable
        Why a value is ``None``, by its key.
    """

    index: int
    device: str
    name: str | None = None
    uuid: str | None = None
    temperature: int | None = None
    utilization: float | None = None
    power_draw: float | None = None
    power_limit: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    clock_sm: float | None = None
    clock_memory: float | None = None
    pcie_tx: int | None = None
    pcie_rx: int | None = None
    nvlink_tx: float | None = None
    nvlink_rx: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    mig: bool | None = None
    mps: bool | None = None
    processes: tuple[DeviceProcess, ...] = ()
    unavailable: dict[str, str] = {}


class DeviceReader(Protocol):
    """Instruments that can be read again and again."""

    def read(self) -> Sequence[Reading]:
        """Return the present readings."""
        ...

    def close(self) -> None:
        """Release the instruments."""
        ...


class MissingValues:
    """The reasons why some of a device's values are missing.

    Parameters
    ----------
    errors
        What a question raises that has no answer here.
    """

    def __init__(self, *errors: type[Exception]) -> None:
        self._errors = errors
        self.reasons: dict[str, str] = {}

    def ask(self, field: str, question: Callable[[], _T]) -> _T | None:
        """Return the answer, or None with the reason recorded under the key of ``field``."""
        try:
            return question()
        except self._errors as error:
            self.note(field, str(error))
            return None

    def note(self, field: str, reason: str) -> None:
        """Record why ``field`` has no value."""
        self.reasons[_KEYS.get(field, field)] = reason
