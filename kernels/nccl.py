"""Device memory of NCCL's communicators: how much there is, and NCCL's own verbs to release and restore it.

``ncclCommMemStats``, ``ncclCommSuspend`` and ``ncclCommResume`` (NCCL 2.29.7 and newer), called by ctypes in
the library that torch has loaded. A suspended communicator keeps its connections; memory of NVLS stays.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass

from gpuslice.errors import DeviceMemoryError, SwitchFailedError

#: In the form that ``ncclGetVersion`` returns.
FIRST_VERSION = 22907
_SUSPEND_MEM = 0x01  # NCCL_SUSPEND_MEM
_UNHANDLED_CUDA_ERROR = 1
#: Values of ``ncclCommMemStat_t``.
_SUSPENDABLE, _PERSISTENT = 0, 2


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the NCCL library that this process has loaded, or None if it lacks the verbs."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    if version.value < FIRST_VERSION:
        return None
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library


@dataclass(frozen=True, slots=True)
class CommunicatorMemory:
    """Bytes of device memory that NCCL tracks for one communicator; what its peers own is theirs."""

    suspendable_bytes: int
    persistent_bytes: int


class Communicator:
    """One ``ncclComm_t`` of this process.

    `suspend` and `resume` return when all ranks of the communicator have called them. In between no
    collective may be started with it, and none may be under way at `suspend`.

    Parameters
    ----------
    address
        The pointer's value, as torch's ``ProcessGroupNCCL._comm_ptr`` returns it.
    """

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def memory(self) -> CommunicatorMemory | None:
        """Return the device memory that NCCL tracks, or None if it cannot tell (nor suspend)."""
        if _library() is None:
            return None
        found = []
        for statistic in (_SUSPENDABLE, _PERSISTENT):
            value = ctypes.c_uint64()
            if self._call("ncclCommMemStats", ctypes.c_int(statistic), ctypes.byref(value)):
                return None  # its memory manager is switched off
            found.append(value.value)
        return CommunicatorMemory(*found)

    def suspend(self) -> bool:
        """Release memory. Return False, with nothing changed, if NCCL refuses (a shared communicator)."""
        return self._call("ncclCommSuspend", ctypes.c_int(_SUSPEND_MEM)) == 0

    def resume(self) -> None:
        """Take the communicator's memory again.

        Raises
        ------
        DeviceMemoryError
            If a CUDA call fails, for which the device most likely lacks memory. It may be tried again.
        SwitchFailedError
            If the communicator is lost.
        """
        code = self._call("ncclCommResume")
        if code == 0:
            return
        library = _library()
        assert library is not None
        text = (library.ncclGetLastError(self._address) or b"").decode(errors="replace")
        what = f"NCCL could not resume a communicator (ncclCommResume returned {code}: {text or 'no text'})"
        if code == _UNHANDLED_CUDA_ERROR:
            raise DeviceMemoryError(what, "free device memory and resume again")
        raise SwitchFailedError(what, "end the job's ranks and start the job again from its snapshot")

    def _call(self, name: str, *arguments: object) -> int:
        return int(getattr(_library(), name)(self._address, *arguments))
