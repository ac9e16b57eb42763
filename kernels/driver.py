"""The driver route: NVIDIA's driver takes a whole process off its GPUs, CUDA context included.

The verbs are the driver's own, ``cuCheckpointProcess*`` of the CUDA driver API, applied to another process
by its id. They are called through ctypes, because they are six functions with fixed structures.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar, NoReturn
from uuid import UUID

from gpuslice.errors import (
    DeviceMemoryError,
    EnvironmentUnusableError,
    NoCudaError,
    SuspendedStateError,
    SuspendRefusedError,
    UsageError,
)

#: The first drivers with the functions, and with the move to another GPU.
MINIMUM_DRIVER = 570
MINIMUM_DRIVER_FOR_MOVES = 580

_OUT_OF_MEMORY = 2
#: Meanings of the codes for these calls; the driver's own text is too general.
_EXPLANATIONS: Mapping[int, tuple[type[EnvironmentUnusableError], str]] = {
    # For a forked child that inherited the library and has not begun CUDA, some drivers return 1, others 3.
    1: (NoCudaError, "there is no such process, it is not yours, or it uses no CUDA"),
    3: (NoCudaError, "the driver is not initialized here, or the process uses no CUDA"),
    100: (EnvironmentUnusableError, "there is no GPU"),
    304: (
        EnvironmentUnusableError,
        "a restore has failed for lack of memory, and driver 580 cannot restore the process any more; end it",
    ),
    600: (SuspendRefusedError, "the process was still busy when the time limit of the lock was reached"),
    801: (
        SuspendRefusedError,
        "the process uses something that this driver cannot checkpoint (memory shared with other processes, "
        "NCCL between GPUs), or the driver is too old",
    ),
}
_ILLEGAL_STATE = 401


class ProcessState(IntEnum):
    """``CUprocessState``."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class LockArgs(ctypes.Structure):
    """``CUcheckpointLockArgs``."""

    _fields_: ClassVar = [
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class GpuPair(ctypes.Structure):
    """``CUcheckpointGpuPair``: UUIDs of the GPU that was left and of the one to go to."""

    _fields_: ClassVar = [("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16)]


class RestoreArgs(ctypes.Structure):
    """``CUcheckpointRestoreArgs``."""

    _fields_: ClassVar = [
        ("pairs", ctypes.POINTER(GpuPair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * (52 - ctypes.sizeof(ctypes.c_void_p))),
        ("reserved1", ctypes.c_uint64),
    ]


def unavailable(driver_major: int) -> str:
    """Return why a driver of this major version (0: none) cannot checkpoint processes; else an empty text."""
    if driver_major == 0:
        return "there is no NVIDIA driver"
    if driver_major < MINIMUM_DRIVER:
        return f"driver {driver_major} is older than {MINIMUM_DRIVER}"
    return ""


class Process:
    """Another process that uses CUDA, as the driver sees it.

    The way out is ``lock``, ``checkpoint``; the way back ``restore``, ``unlock``. Each verb moves the process
    from one `ProcessState` to the next; in another state it is refused and changes nothing.

    Parameters
    ----------
    pid
        The process; never the caller's own, because a locked process cannot call the driver.

    Raises
    ------
    EnvironmentUnusableError
        If the driver is missing, does not start, or lacks the functions.
    UsageError
        For the caller's own process.
    """

    def __init__(self, pid: int) -> None:
        if pid == os.getpid():
            raise UsageError("a process cannot take itself off the GPU", "do it from another process")
        self.pid = pid
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise EnvironmentUnusableError(
                f"there is no NVIDIA driver: {error}",
                f"install driver {MINIMUM_DRIVER} or newer",
            ) from error
        # A restore needs this. After the first call it costs nothing.
        self._call("cuInit", ctypes.c_uint(0))

    @property
    def state(self) -> ProcessState:
        """State of the process, as the driver sees it."""
        state = ctypes.c_int()
        self._call("cuCheckpointProcessGetState", self.pid, ctypes.byref(state))
        return ProcessState(state.value)

    def lock(self, timeout_ms: int = 0) -> None:
        """Block the process's CUDA calls, and wait for those under way; a timeout of 0 waits without end.

        Raises
        ------
        SuspendRefusedError
            If it is still busy after ``timeout_ms``; it goes on.
        SuspendedStateError
            If it is not running.
        """
        self._call("cuCheckpointProcessLock", self.pid, ctypes.byref(LockArgs(timeout_ms)))

    def checkpoint(self) -> None:
        """Move the process's device memory to host memory, and release its GPUs."""
        self._call("cuCheckpointProcessCheckpoint", self.pid, None)

    def restore(self, moves: Mapping[UUID, UUID] | None = None) -> None:
        """Move the memory back, to other GPUs of the same type if ``moves`` names one for every GPU.

        Raises
        ------
        DeviceMemoryError
            If the GPU lacks memory. Driver 580 never brings this process back then; others may lose it: see
            `state`. `gpuslice.driver_route.adopted` looks before it asks.
        """
        pairs = [_pair(old, new) for old, new in (moves or {}).items()]
        array = (GpuPair * len(pairs))(*pairs)
        arguments = RestoreArgs(array, len(pairs)) if pairs else None
        self._call("cuCheckpointProcessRestore", self.pid, arguments and ctypes.byref(arguments))

    def unlock(self) -> None:
        """Let the process call CUDA again."""
        self._call("cuCheckpointProcessUnlock", self.pid, None)

    def _call(self, name: str, *arguments: object) -> None:
        """Call one function of the driver. Raise the matching error if it returns a code other than 0."""
        try:
            function = getattr(self._cuda, name)
        except AttributeError:
            raise EnvironmentUnusableError(
                f"this driver has no {name}", f"update it to {MINIMUM_DRIVER} or newer"
            ) from None
        code = function(*arguments)
        if code != 0:
            self._fail(name, code)

    def _fail(self, name: str, code: int) -> NoReturn:
        where = f"{name} for process {self.pid}" if name != "cuInit" else name
        if code == _OUT_OF_MEMORY:
            raise DeviceMemoryError(f"{where}: the GPU lacks memory", "suspend another job, then try again")
        if code == _ILLEGAL_STATE:
            raise SuspendedStateError(
                f"{where}: the process is not in the state for it",
                "the order is lock, checkpoint, restore, unlock",
            )
        kind, meaning = _EXPLANATIONS.get(
            code, (EnvironmentUnusableError, "see CUresult in NVIDIA's documentation")
        )
        raise kind(f"{where} returned CUDA error {code}: {meaning}", "run the job with --route tensor")


def _pair(old: UUID, new: UUID) -> GpuPair:
    return GpuPair((ctypes.c_ubyte * 16)(*old.bytes), (ctypes.c_ubyte * 16)(*new.bytes))
