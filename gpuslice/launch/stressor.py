"""Load a device by a schedule: ``python -m gpuslice.launch.stressor LOG DEVICE SCHEDULE``.

It makes units of work, each followed by enough idle time that work has the wanted share of the time, and
records when each unit ended. SIGTERM ends it early, with the log so far.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from gpuslice.errors import EnvironmentUnusableError, GpusliceError, UsageError
from gpuslice.profiler.colocation.stress import Phase, StressLog, Window

#: All kinds of load.
KINDS = ("bandwidth", "compute", "cache", "pcie")

_Unit = Callable[[], None]


def check_kinds(words: str, device_kind: str) -> tuple[str, ...]:
    """Return the kinds of load that ``words`` lists, separated by commas.

    Raises
    ------
    UsageError
        If one is unknown, or none is given, or the device has no part that a kind could load.
    """
    kinds = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise UsageError(
            f"--stress {words} names no kind of load, or an unknown one", f"choose among {', '.join(KINDS)}"
        )
    if "pcie" in kinds and device_kind == "cpu":
        raise UsageError(
            "--stress pcie on a host slot: jobs there send nothing over PCIe", "leave pcie out, or name a GPU"
        )
    return kinds


def stressors(device_kind: str) -> Mapping[str, Callable[[], _Unit]]:
    """Return functions that make a unit of work of each kind, for a kind of device.

    Raises
    ------
    EnvironmentUnusableError
        If the library that the units need is missing.
    """
    try:
        if device_kind == "cpu":
            from gpuslice.profiler.colocation.host_stressors import STRESSORS
        else:
            from gpuslice.profiler.colocation.cuda_stressors import STRESSORS
    except ImportError as error:
        library, extra = ("numba", "") if device_kind == "cpu" else ("CuPy", "[cu12] or gpuslice[cu13]")
        raise EnvironmentUnusableError(
            f"--stress on {device_kind} needs {library}: {error}", f"pip install gpuslice{extra}"
        ) from error
    return STRESSORS


def perform(
    schedule: list[Phase],
    make: Mapping[str, Callable[[], _Unit]],
    stopped: Callable[[], bool] = lambda: False,
    ready: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    worked: Callable[[], float] = time.thread_time,
    idle: Callable[[float], None] = time.sleep,
) -> StressLog:
    """Load the device by ``schedule``, and return the log of the units' ends.

    Parameters
    ----------
    make
        Makes the unit of each kind. All units are made, and called once, before the first phase.
    stopped
        Called around each unit. Returns True to end.
    ready
        Called when the schedule begins.
    clock, worked, idle
        Functions that return the time, return this thread's working time, and pause.
    """
    units = {phase.kind: make[phase.kind]() for phase in schedule if phase.kind}
    for unit in units.values():
        unit()
    ready()
    windows = []
    for phase in schedule:
        begun_s = clock()
        ends: list[float] = []
        while not stopped() and clock() < begun_s + phase.seconds:
            if not phase.kind:
                idle(min(0.05, max(0.0, begun_s + phase.seconds - clock())))
                continue
            since_s = worked()
            units[phase.kind]()
            ends.append(clock())
            if phase.level < 1.0:
                idle((worked() - since_s) * (1 / phase.level - 1))
        windows.append(Window(phase.kind, phase.level, begun_s, clock(), ends))
        if stopped():
            break
    return StressLog(windows)


def main(log: str, device_kind: str, schedule: str) -> None:
    """Load a device by ``schedule`` (JSON), and write the log to the file ``log``."""
    asked: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)

    signal.signal(signal.SIGTERM, ask)
    phases = msgspec.json.decode(schedule, type=list[Phase])
    # The host does not work while a GPU does, so a unit's whole time counts there.
    worked = time.thread_time if device_kind == "cpu" else time.perf_counter
    ready = Path(log).with_suffix(".ready").touch
    found = perform(phases, stressors(device_kind), lambda: bool(asked), ready, worked=worked)
    draft = Path(log).with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(found))
    draft.replace(log)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:4])
    except GpusliceError as error:
        sys.exit(f"{error.message}; {error.remedy}")
