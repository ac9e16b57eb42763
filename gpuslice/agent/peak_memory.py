"""The peak memory of a job on its device while it trains. Packing decides by it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpuslice.kernels.cuda import allocator_memory, runtime_calls
from gpuslice.profiler.memory import peak_anonymous_bytes, reset_peak
from gpuslice.types import DeviceName

#: Steps after which a job is measured. Optimizers allocate their state at the first step.
_WARM_UP_STEPS = 3


class PeakMemory:
    """The peak memory of this process: torch's reserved memory on a GPU, anonymous memory on the host.

    Memory that is used to move the state does not count. On the host the peak is reset after each move. On a
    GPU only the script may reset the peak. Until the peak exceeds that of the last move, the memory reserved
    at the time of a `look` counts.
    """

    def __init__(self) -> None:
        self._most_bytes = 0
        #: The GPU's peak in bytes when training last began or resumed.
        self._moving_bytes = 0

    def begin(self, leased: DeviceName) -> None:
        """Note that the state is on device ``leased`` and training goes on: ignore the peak of the move."""
        reset_peak()
        self._moving_bytes = _reserved_bytes(torch.cuda.max_memory_reserved, leased)

    def look(self, leased: DeviceName, steps: int) -> int:
        """Measure while the job trains, and return the peak in bytes; 0 if not known yet. For any thread."""
        if steps >= _WARM_UP_STEPS:
            self._most_bytes = max(self._most_bytes, self._peak_bytes(leased))
        return self._most_bytes

    @property
    def most_bytes(self) -> int:
        """The peak in bytes as of the last `look`."""
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
