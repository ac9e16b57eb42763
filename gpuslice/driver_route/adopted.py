"""Suspend and resume a process that gpuslice did not start, by NVIDIA's driver (docs/gpus.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from uuid import UUID

import msgspec

from gpuslice.clock import process_began
from gpuslice.errors import (
    DeviceMemoryError,
    EnvironmentUnusableError,
    GpusliceError,
    RollbackError,
    SuspendedStateError,
    UsageError,
)
from gpuslice.kernels.compiler import cache_directory
from gpuslice.kernels.driver import MINIMUM_DRIVER_FOR_MOVES, ProcessState
from gpuslice.kernels.nvml import Driver, bytes_of_process, read_driver
from gpuslice.launch.visible_gpus import visible

#: Longest wait for the process's CUDA calls: a training step is over by then.
LOCK_TIMEOUT_S = 60.0
#: Folder in the user's cache with the GPU memory sizes of suspended processes.
_FOLDER = "adopted"


class CheckpointableProcess(Protocol):
    """The interface of `gpuslice.kernels.driver.Process`."""

    pid: int

    @property
    def state(self) -> ProcessState: ...
    def lock(self, timeout_ms: int = 0) -> None: ...
    def checkpoint(self) -> None: ...
    def restore(self, moves: Mapping[UUID, UUID] | None = None) -> None: ...
    def unlock(self) -> None: ...


def check_pid(pid: int) -> None:
    """Raise ``UsageError`` if a process does not exist or belongs to another user.

    Raises
    ------
    UsageError
        Naming the process.
    """
    if not 0 < pid < 1 << 31:
        raise UsageError(
            f"{pid} is not a process id",
            "give the id of a process that uses a GPU; `gpuslice smi` lists them",
        )
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        raise UsageError(
            f"there is no process {pid}",
            "give the id of a process that uses a GPU; `gpuslice smi` lists them",
        ) from None
    except PermissionError:
        raise UsageError(
            f"process {pid} belongs to another user", "run gpuslice as its owner or as root"
        ) from None


def suspend(process: CheckpointableProcess, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Take the process off its GPUs: its memory there lies in the host's, and its CUDA calls wait.

    One that was locked already, by a suspend that was cut off, is suspended from there. If the driver
    refuses, the process goes on.

    Raises
    ------
    SuspendedStateError
        If it is suspended already.
    SuspendRefusedError
        If it is still busy after ``timeout_s``, or uses what the driver cannot take away.
    RollbackError
        If it was refused and cannot go on either.
    """
    state = process.state
    _refuse_lost(process, state)
    if state is ProcessState.CHECKPOINTED:
        raise SuspendedStateError(f"process {process.pid} is suspended already", "resume it first")
    if state is ProcessState.RUNNING:
        process.lock(max(1, round(timeout_s * 1000)))
    try:
        _remember(process.pid)
        process.checkpoint()
    except GpusliceError as refusal:
        try:
            process.unlock()
        except GpusliceError as error:
            raise RollbackError(
                f"process {process.pid} could not be suspended ({refusal.message}), nor unlocked "
                f"({error.message})",
                f"try `gpuslice adopt {process.pid} --resume`, else end it",
            ) from refusal
        raise


def resume(process: CheckpointableProcess, moves: Mapping[UUID, UUID] | None = None) -> None:
    """Bring the process back to its GPUs, or to others; one that was only locked goes on.

    Raises
    ------
    SuspendedStateError
        If it is not suspended.
    UsageError
        If it is to move and has not left its GPUs.
    DeviceMemoryError
        If the GPU lacks memory; it stays suspended, and the resume may be tried again. The driver is not
        asked then: one that has failed to bring a process back may never do it.
    """
    state = process.state
    _refuse_lost(process, state)
    if state is ProcessState.RUNNING:
        raise SuspendedStateError(f"process {process.pid} is not suspended", "suspend it first")
    if state is ProcessState.CHECKPOINTED:
        _check_room(process.pid, moves or {})
        process.restore(moves)
    elif moves is not None:
        raise UsageError(
            f"process {process.pid} is only locked and cannot move", "resume it without --to, then suspend it"
        )
    process.unlock()
    with suppress(OSError):  # the next suspend clears it away
        _file_of(process.pid).unlink()


def _remember(pid: int) -> None:
    """Record what a process has on its GPUs. After it has left them, this cannot be found out."""
    path = _file_of(pid)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        for old in path.parent.iterdir():
            if not Path("/proc", old.name.partition(".")[0]).exists():
                old.unlink(missing_ok=True)
        path.write_bytes(msgspec.json.encode(bytes_of_process(pid)))
    except OSError as error:
        raise EnvironmentUnusableError(
            f"{path} cannot be written: {error.strerror}", "set XDG_CACHE_HOME to another directory"
        ) from error


def _check_room(pid: int, moves: Mapping[UUID, UUID]) -> None:
    """Raise if the GPUs lack the memory for a process to come back, as far as both sizes are known."""
    path = _file_of(pid)
    try:
        needed = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except FileNotFoundError:  # it was suspended by other means
        return
    except (OSError, msgspec.MsgspecError) as error:
        raise EnvironmentUnusableError(
            f"{path}, which says what process {pid} needs, cannot be read: {error}",
            "make room on its GPUs, remove that file, and resume it again",
        ) from error
    targets = {f"GPU-{old}": f"GPU-{new}" for old, new in moves.items()}
    for gpu in read_driver().gpus:
        needed_bytes = sum(nbytes for uuid, nbytes in needed.items() if targets.get(uuid, uuid) == gpu.uuid)
        if gpu.total_bytes is not None and gpu.used_bytes is not None:
            free_bytes = gpu.total_bytes - gpu.used_bytes
            if needed_bytes > free_bytes:
                raise DeviceMemoryError(
                    f"GPU {gpu.index} has {free_bytes} bytes free, process {pid} needs {needed_bytes}",
                    "suspend another job, then try again; it stays suspended",
                )


def _file_of(pid: int) -> Path:
    """Return the path where a process's memory use is kept. A later process with its pid has another."""
    return cache_directory() / _FOLDER / f"{pid}.{process_began(pid)}"


def moves_to(
    targets: Sequence[int], sources: Sequence[int], driver: Driver, environ: Mapping[str, str]
) -> dict[UUID, UUID]:
    """Return the moves for the driver: a new GPU for every GPU here. Unnamed GPUs keep their place.

    Parameters
    ----------
    targets, sources
        CUDA numbers in the caller's environment; GPU ``sources[i]`` and ``targets[i]`` change places.

    Raises
    ------
    UsageError
        For a GPU that is not here, or one that is named twice.
    EnvironmentUnusableError
        If the driver cannot move processes, or not between what is visible (instances of MIG).
    """
    if driver.major < MINIMUM_DRIVER_FOR_MOVES:
        raise EnvironmentUnusableError(
            f"driver {driver.major} cannot move a process to another GPU",
            f"update it to {MINIMUM_DRIVER_FOR_MOVES} or newer, or resume without --to",
        )
    gpus = visible(driver.gpus, environ)
    named = [*targets, *sources]
    if len(set(named)) < len(named):
        raise UsageError(f"a GPU is named twice: {', '.join(map(str, named))}", "name each once")
    for number in named:
        if not 0 <= number < len(gpus):
            raise UsageError(f"there is no cuda:{number} here", "see `gpuslice doctor`")
    for number, gpu in enumerate(gpus):
        if not (gpu.uuid or "").startswith("GPU-"):
            raise EnvironmentUnusableError(
                f"the driver moves processes between whole GPUs, and cuda:{number} is no whole GPU",
                "resume without --to",
            )
    places = list(range(len(gpus)))
    for source, target in zip(sources, targets, strict=True):
        places[source], places[target] = places[target], places[source]
    uuids = [UUID((gpu.uuid or "").removeprefix("GPU-")) for gpu in gpus]
    return {uuids[old]: uuids[new] for old, new in enumerate(places)}


def _refuse_lost(process: CheckpointableProcess, state: ProcessState) -> None:
    if state is ProcessState.FAILED:
        raise EnvironmentUnusableError(
            f"the driver has lost process {process.pid}: an earlier resume failed half way",
            "end it, and start it again from its own checkpoint",
        )
