"""Read the instruments of NVIDIA GPUs through NVML. No torch, no CUDA context."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import psutil
import pynvml

from gpuslice.errors import EnvironmentUnusableError
from gpuslice.kernels.nvml import Gpu, read_driver

from .devices import MIB, DeviceProcess, MissingValues, Reading

#: All NVLinks of a GPU together (the ``scopeId`` of ``nvmlDeviceGetFieldValues``).
_ALL_LINKS = 0xFFFFFFFF
_LINK_FIELDS = {
    "nvlink_tx": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    "nvlink_rx": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
}
#: Bits of ``nvmlDeviceGetCurrentClocksEventReasons``.
_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_MILLIWATT = 1e-3


class GpuReader:
    """Reads all GPUs of this machine.

    Raises
    ------
    EnvironmentUnusableError
        If there is no driver.
    """

    def __init__(self) -> None:
        driver = read_driver()
        if driver.problem:
            raise EnvironmentUnusableError(driver.problem, "see `gpuslice doctor`")
        self.driver_version = driver.version
        self._gpus = driver.gpus
        #: Last value in KiB, and its time, of each counter of a GPU's links.
        self._counters: dict[tuple[int, str], tuple[float, int]] = {}
        pynvml.nvmlInit()

    def read(self) -> list[Reading]:
        return [self._read(gpu) for gpu in self._gpus]

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def _read(self, gpu: Gpu) -> Reading:
        missing = MissingValues(Exception)  # see `kernels.nvml._ask`
        handle = missing.ask("device", lambda: pynvml.nvmlDeviceGetHandleByIndex(gpu.index))
        if handle is None:
            return Reading(
                index=gpu.index, device=f"cuda:{gpu.index}", name=gpu.name, unavailable=missing.reasons
            )
        rates: Any = missing.ask("utilization", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        memory: Any = missing.ask("memory_used", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
        values: dict[str, Any] = {name: missing.ask(name, ask) for name, ask in _scalars(handle).items()}
        values |= {field: self._link_rate(gpu.index, field, handle, missing) for field in _LINK_FIELDS}
        return Reading(
            index=gpu.index,
            device=f"cuda:{gpu.index}",
            name=gpu.name,
            uuid=gpu.uuid,
            utilization=None if rates is None else float(rates.gpu),
            memory_used=None if memory is None else memory.used / MIB,
            memory_total=None if memory is None else memory.total / MIB,
            throttle_reasons=missing.ask("throttle_reasons", lambda: _throttle_reasons(handle)),
            processes=missing.ask("processes", lambda: _processes(handle)) or (),
            unavailable=missing.reasons,
            **values,
        )

    def _link_rate(self, index: int, field: str, handle: Any, missing: MissingValues) -> float | None:
        """Return the KiB/s that all links have carried since the last reading; None at the first one."""
        counter = missing.ask(field, lambda: _link_counter(handle, _LINK_FIELDS[field]))
        if counter is None:
            return None
        now, before = monotonic(), self._counters.get((index, field))
        self._counters[index, field] = now, counter
        if before is None:
            missing.note(field, "a rate takes two readings")
            return None
        return (counter - before[1]) / max(now - before[0], 1e-9)


def _scalars(handle: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that ask NVML for one number each, by field."""
    nvml = pynvml
    return {
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_draw": lambda: nvml.nvmlDeviceGetPowerUsage(handle) * _MILLIWATT,
        "power_limit": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) * _MILLIWATT,
        "clock_sm": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "clock_memory": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "pcie_tx": lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
        "pcie_rx": lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
        "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
        "mps": lambda: bool(nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)),
    }


def _link_counter(handle: Any, field: int) -> int:
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS)])
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return int(value.value.ullVal)


def _throttle_reasons(handle: Any) -> tuple[str, ...]:
    try:
        bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError:  # the name in drivers before 535
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


def _processes(handle: Any) -> tuple[DeviceProcess, ...]:
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:  # drivers before 510
            raise
        running = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
    return tuple(
        named_process(found.pid, None if found.usedGpuMemory is None else found.usedGpuMemory / MIB)
        for found in running
    )


def named_process(pid: int, memory_mib: float | None) -> DeviceProcess:
    """Return the process with its user and command, as far as this user may see them."""
    try:
        process = psutil.Process(pid)
        return DeviceProcess(pid, process.username(), process.name(), memory_mib)
    except psutil.Error:
        return DeviceProcess(pid, None, None, memory_mib)
