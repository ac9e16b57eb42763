"""``gpuslice smi``: what the devices' instruments show."""

from __future__ import annotations

import json
import platform
import sys
import threading
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from gpuslice import config
from gpuslice.errors import EnvironmentUnusableError

from . import tables
from .declare import Option
from .options import Json

if TYPE_CHECKING:
    from gpuslice.profiler.devices import DeviceReader, Reading

#: Rates and utilization are those since the last reading.
_FIRST_S, _EVERY_S = 0.3, 1.0
_HEADER = ("DEVICE", "NAME", "UTIL", "MEMORY", "TEMP", "POWER", "SM CLOCK", "PCIE TX/RX", "THROTTLED", "PIDS")
_HOME = "\x1b[H\x1b[J"


def command(
    as_json: Json = False,
    watch: Annotated[bool, Option("--watch", help="Print again every second, until Ctrl-C.")] = False,
) -> int:
    """Show load, memory, power and processes of GPUs and host slots.

    The keys of --json are gpustat's where it has them (docs/json.md).
    """
    from gpuslice.profiler.sampler import Sampler

    readers, version, problem = _readers()
    shown = threading.Event()

    def show(readings: list[Reading]) -> None:
        if watch and sys.stdout.isatty():
            sys.stdout.write(_HOME)
        if as_json:
            print(json.dumps(_as_json(readings, version, problem)), flush=True)
        else:
            _show(readings, version, problem)
        shown.set()

    try:
        with Sampler(readers, _EVERY_S if watch else _FIRST_S, show) as sampler:
            while not shown.wait(_FIRST_S) or watch:
                if watch:
                    shown.clear()
                if not sampler.running:
                    break
    finally:
        for reader in readers:
            reader.close()
    return 0


def _readers() -> tuple[list[DeviceReader], str | None, str]:
    """Return readers of GPUs and the host, the driver's version, and why there are no GPUs."""
    from gpuslice.profiler.gpus import GpuReader
    from gpuslice.profiler.hosts import HostReader

    host = HostReader(config.load().cpu_slots)
    try:
        gpus = GpuReader()
    except EnvironmentUnusableError as error:
        return [host], None, error.message
    return [gpus, host], gpus.driver_version, ""


def _as_json(readings: Sequence[Reading], version: str | None, problem: str) -> dict[str, Any]:
    import msgspec

    plain = [msgspec.to_builtins(reading) for reading in readings]
    return {
        "hostname": platform.node(),
        "driver_version": version,
        "driver_problem": problem,
        "query_time": datetime.now().astimezone().isoformat(),
        "gpus": [one for one in plain if one["device"].startswith("cuda")],
        "cpus": [one for one in plain if one["device"].startswith("cpu")],
    }


def _show(readings: Sequence[Reading], version: str | None, problem: str) -> None:
    driver = f"driver {version}" if version else f"no GPUs: {problem}"
    print(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {driver}")
    tables.show([_HEADER, *map(_row, readings)])


def _row(reading: Reading) -> tables.Row:
    pcie = "-"
    if reading.pcie_tx is not None and reading.pcie_rx is not None:
        pcie = f"{reading.pcie_tx / 1e3:.0f}/{reading.pcie_rx / 1e3:.0f} MB/s"
    memory = "-"
    if reading.memory_used is not None and reading.memory_total is not None:
        memory = f"{reading.memory_used:.0f}/{reading.memory_total:.0f} MiB"
    flags = [*(["MIG"] if reading.mig else []), *(["MPS"] if reading.mps else [])]
    return (
        reading.device,
        " ".join([reading.name or "-", *flags]),
        tables.number(reading.utilization, 0, "%"),
        memory,
        tables.number(reading.temperature, 0, "°C"),
        tables.number(reading.power_draw, 0, "W"),
        tables.number(reading.clock_sm, 0, "MHz"),
        pcie,
        ",".join(reading.throttle_reasons or ()) or "-",
        ",".join(str(process.pid) for process in reading.processes) or "-",
    )
