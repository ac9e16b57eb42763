"""``python -m gpuslice.driver_route.switch suspend|resume PID``: suspend or resume by the driver.

This applies to a process and its descendants. The result is reported on stderr. The exit code is 0 if all
processes that use CUDA are in the wanted state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from gpuslice.driver_route import adopted
from gpuslice.errors import GpusliceError, NoCudaError, RollbackError
from gpuslice.kernels.driver import Process, ProcessState


def main(verb: str, pid: int) -> int:
    act, done = (suspend_all, "suspended") if verb == "suspend" else (resume_all, "resumed")
    try:
        count = act(processes(pid))
    except GpusliceError as error:
        sys.stderr.write(f"gpuslice: not {done}: {error}\n")
        return 1
    sys.stderr.write(f"gpuslice: {done} {count} process{'es' if count != 1 else ''}\n")
    return 0


def processes(pid: int) -> list[Process]:
    """Return the process and its descendants that use CUDA, sorted by id."""
    try:
        root = psutil.Process(pid)
        pids = sorted({pid, *(child.pid for child in root.children(recursive=True))})
    except psutil.NoSuchProcess:
        return []
    found = []
    for each in filter(_has_driver, pids):
        process = Process(each)
        with suppress(NoCudaError):  # a loader's worker, say, which has the library from its parent
            process.state  # noqa: B018 - the driver is asked
            found.append(process)
    return found


def _has_driver(pid: int) -> bool:
    try:
        return "libcuda.so" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it ended meanwhile
        return False


def suspend_all(found: Sequence[adopted.CheckpointableProcess]) -> int:
    """Suspend all processes and return their number. If one is refused, those before it are resumed."""
    done: list[adopted.CheckpointableProcess] = []
    try:
        for process in found:
            adopted.suspend(process)
            done.append(process)
    except GpusliceError as refusal:
        try:
            resume_all(done)
        except GpusliceError as error:
            raise RollbackError(
                f"{refusal.message}; and of those suspended before, not all came back: {error.message}",
                "send SIGCONT to try again",
            ) from refusal
        raise
    return len(done)


def resume_all(found: Sequence[adopted.CheckpointableProcess]) -> int:
    """Resume all processes that are not running, and return their number.

    After an error the rest can be resumed in another try.
    """
    away = [process for process in found if process.state is not ProcessState.RUNNING]
    for process in away:
        adopted.resume(process)
    return len(away)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
