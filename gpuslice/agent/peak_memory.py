"""The most memory that a job has used on its device while it trained: what packing counts with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpuslice.kernels.cuda import allocator_memory, runtime_calls
from gpuslice.profiler.memory import peak_anonymous_bytes, reset_peak
from gpuslice.types import DeviceName

#: A job is measured once it has made so many steps: optimizers allocate their state at the first one.
_WARM_UP_STEPS = 3


class PeakMemory:
    """Of this process: on a GPU what torch's allocator reserves, on the host its anonymous resident memory.

    Moving the state takes memory, too, which does not count. On the host the peak is counted anew after each
    move. On a GPU it is the script's to reset: as long as there is none above that of the moves, what is
    reserved when somebody looks counts.
    """

    def __init__(self) -> None:
        self._most_bytes = 0
        #: The peak of the GPU when training went on last.
        self._moving_bytes = 0

    def begin(self, leased: DeviceName) -> None:
        """The state is on the device, and training goes on."""
        reset_peak()
        self._moving_bytes = _reserved_bytes(torch.cuda.max_memory_reserved, leased)

    def look(self, leased: DeviceName, steps: int) -> int:
        """Bytes, up to now; 0: not known. Call it while the job trains, in any thread."""
        if steps >= _WARM_UP_STEPS:
            self._most_bytes = max(self._most_bytes, self._peak_bytes(leased))
        return self._most_bytes

    @property
    def most_bytes(self) -> int:
        """What was seen last."""
        return self._most_bytes

    def _peak_bytes(self, leased: DeviceName) -> int:
        if leased.kind != "cuda":
            return peak_anonymous_bytes() or 0
        peak_bytes = _reserved_bytes(torch.cuda.max_memory_reserved, leased)
        if peak_bytes > self._moving_bytes:
            return peak_bytes
        return _reserved_bytes(torch.cuda.memory_reserved, leased)


def _reserved_bytes(ask: Callable[[int], int], leased: DeviceName) -> int:
    if leased.kind != "cuda" or not runtime_calls.has_begun():
        return 0
    return int(allocator_memory.statistics(lambda: ask(leased.index or 0)) or 0)
