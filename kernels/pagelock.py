"""Page-locking: arenas that a GPU's copy engines can reach by themselves, each locked once by this process.

A lock costs about 0.1 s per GiB of pages that are there, ten times that if they must be faulted in. So it is
taken when an arena is mapped, in whatever thread warms it up, and kept until it is unmapped.
"""

from __future__ import annotations

import resource
import threading
from typing import Protocol

from gpuslice.errors import EnvironmentUnusableError

#: ``cudaErrorHostMemoryAlreadyRegistered``
ALREADY_REGISTERED = 712


class Runtime(Protocol):
    """The two calls of the CUDA runtime; both return its error code, and leave none behind."""

    def host_register(self, address: int, nbytes: int) -> int: ...
    def host_unregister(self, address: int) -> int: ...


class PageLocks:
    """The locks of this process; safe to use from several threads."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._problems: dict[int, str] = {}
        self._lock = threading.Lock()
        #: How often pages were locked.
        self.count = 0

    def take(self, runtime: Runtime, address: int, nbytes: int) -> bool:
        """Lock a mapping unless it is locked already; ``False`` if the system refuses, see `problem`."""
        with self._lock:
            if self._held.get(address) == nbytes:
                return True
            code = runtime.host_register(address, nbytes)
            if code == ALREADY_REGISTERED and runtime.host_unregister(address) == 0:
                # A lock of a mapping that was here before, whose pages are not these.
                code = runtime.host_register(address, nbytes)
            if code != 0:
                self._problems[address] = _explain(code, nbytes)
                return False
            self._problems.pop(address, None)
            self._held[address] = nbytes
            self.count += 1
            return True

    def release(self, runtime: Runtime, address: int) -> None:
        """Unlock a mapping, which must come before it goes away; nothing if it is not locked.

        Raises
        ------
        EnvironmentUnusableError
            If CUDA refuses. Another mapping at this address would be copied to the wrong pages.
        """
        with self._lock:
            self._problems.pop(address, None)
            if self._held.pop(address, None) is None:
                return
            code = runtime.host_unregister(address)
        if code != 0:
            raise EnvironmentUnusableError(
                f"cudaHostUnregister of the arena at {address:#x} failed with CUDA error {code}"
            )

    def problem(self, address: int, nbytes: int) -> str:
        """Why these bytes are not locked, or an empty string."""
        with self._lock:
            if self._held.get(address, 0) >= nbytes:
                return ""
            return self._problems.get(address, "nobody asked for it")


def _explain(code: int, nbytes: int) -> str:
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "" if soft_bytes == resource.RLIM_INFINITY else f", ulimit -l allows {soft_bytes}"
    return f"cudaHostRegister of {nbytes} bytes gave CUDA error {code}{limit}"
