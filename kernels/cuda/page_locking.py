"""Page-locking of arenas, so that a GPU's copy engines reach them directly. Each is locked once per process.

A lock costs about 0.1 s per GiB of pages that are there, several times that if they must be faulted in (0.4
to 0.6 s per GB on an H100's host). So an arena is locked when it is mapped, in the thread that warms it up,
and stays locked until it is unmapped.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from gpuslice.errors import EnvironmentUnusableError

from . import runtime_calls

#: Bytes that one call locks. The driver holds a lock of its own meanwhile, and others wait for it.
LOCK_BYTES = 256 << 20
#: ``cudaErrorHostMemoryAlreadyRegistered``
ALREADY_REGISTERED = 712
#: ``cudaErrorHostMemoryNotRegistered``
NOT_REGISTERED = 713
#: ``cudaErrorUnknown``
_UNKNOWN = 999
#: ``cudaHostRegisterPortable``: page-locked for all devices of the process, also for a later move.
_PORTABLE = 1


class Runtime:
    """The two calls of the CUDA runtime for one GPU. Both return and clear CUDA's error code."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu

    def host_register(self, address: int, nbytes: int) -> int:
        return self._call(lambda: torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]

    def host_unregister(self, address: int) -> int:
        return self._call(lambda: torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]

    def _call(self, function: Callable[[], Any]) -> int:
        try:
            with runtime_calls.on_gpu(self._gpu):
                code = int(function())
                # A failed call leaves an error in this thread for the next launch to report.
                if code != 0 and not runtime_calls.spend_error():
                    with suppress(RuntimeError):
                        torch.zeros(1, device=torch.device("cuda", self._gpu))
                        torch.cuda.synchronize(self._gpu)
                return code
        except RuntimeError as error:  # after an error of its script the process cannot use the GPU any more
            return int(getattr(error, "error_code", _UNKNOWN))


class PageLocks:
    """The page-locks of this process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._problems: dict[int, str] = {}
        #: Parts that CUDA would not unlock. A copy of a new mapping there would cross their ends.
        self._stuck: set[int] = set()
        self._lock = threading.Lock()
        #: Number of mappings locked so far.
        self.count = 0

    def take(self, runtime: Runtime, address: int, nbytes: int) -> bool:
        """Lock a mapping if it is not locked yet. Return False if the system refuses; `problem` says why."""
        with self._lock:
            if self._held.get(address) == nbytes:
                return True
            code = self._lock_parts(runtime, address, nbytes)
            if code != 0:
                self._problems[address] = _explain(code, nbytes)
                return False
            self._problems.pop(address, None)
            self._held[address] = nbytes
            self.count += 1
            return True

    def _lock_parts(self, runtime: Runtime, address: int, nbytes: int) -> int:
        """Lock all parts of a mapping or none. Return 0, or the code of the first refusal."""
        done: list[int] = []
        self._stuck = {
            part for part in self._stuck if runtime.host_unregister(part) not in (0, NOT_REGISTERED)
        }
        for part, part_bytes in _parts(address, nbytes):
            code = runtime.host_register(part, part_bytes)
            if code == ALREADY_REGISTERED and runtime.host_unregister(part) == 0:
                # The lock belongs to an earlier mapping at this address, with other pages.
                code = runtime.host_register(part, part_bytes)
            if code != 0:
                self._unlock(runtime, done)
                return code
            self._stuck.discard(part)
            done.append(part)
        return 0

    def release(self, runtime: Runtime, address: int) -> None:
        """Unlock a mapping before it goes away. Does nothing if it is not locked.

        Raises
        ------
        EnvironmentUnusableError
            If CUDA refuses. Another mapping at this address would be copied to the wrong pages.
        """
        with self._lock:
            self._problems.pop(address, None)
            nbytes = self._held.pop(address, None)
            if nbytes is not None:
                self._unlock(runtime, [part for part, _ in _parts(address, nbytes)])

    def _unlock(self, runtime: Runtime, parts: Sequence[int]) -> None:
        """Unlock these parts. Raise for the first that is refused; it is tried again before a new lock."""
        codes = {part: code for part in parts if (code := runtime.host_unregister(part)) != 0}
        self._stuck |= codes.keys()
        for part, code in codes.items():
            raise EnvironmentUnusableError(
                f"cudaHostUnregister of the arena at {part:#x} failed with CUDA error {code}"
            )

    def apart(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the parts, as start and bytes, into which locks divide a copy of host memory."""
        for base, held_bytes in list(self._held.items()):
            if base <= address < base + held_bytes:
                first = (address - base) // LOCK_BYTES + 1
                edges = range(base + first * LOCK_BYTES, address + nbytes, LOCK_BYTES)
                starts = [0, *(edge - address for edge in edges)]
                return [(at, to - at) for at, to in zip(starts, [*starts[1:], nbytes], strict=True)]
        return [(0, nbytes)]

    def problem(self, address: int, nbytes: int) -> str:
        """Return why these bytes are not locked, or an empty string."""
        with self._lock:
            if self._held.get(address, 0) >= nbytes:
                return ""
            return self._problems.get(address, "it was never asked for")


def _parts(address: int, nbytes: int) -> list[tuple[int, int]]:
    """Return address and bytes of each part that one call locks."""
    return [(address + at, min(LOCK_BYTES, nbytes - at)) for at in range(0, nbytes, LOCK_BYTES)]


def _explain(code: int, nbytes: int) -> str:
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "" if soft_bytes == resource.RLIM_INFINITY else f", ulimit -l allows {soft_bytes}"
    return f"cudaHostRegister of {nbytes} bytes gave CUDA error {code}{limit}"


#: The locks of this process, for all of its GPUs.
LOCKS = PageLocks()
