"""Measure time by a GPU's own clock, and the memory of this process there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from gpuslice.kernels.cuda.allocator_memory import statistics
from gpuslice.kernels.nvml import own_bytes

from .memory import MemoryUse, unaccounted


class CudaClock:
    """CUDA events on the current stream: they mark when the GPU gets there, not when the host queued it."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def mark(self) -> None:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def intervals_s(self) -> list[float]:
        """Return the seconds between successive marks. Waits for the GPU."""
        events = list(self._events)
        if events:
            events[-1].synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(events)]


class CudaMemory:
    """The memory of this process on GPU ``index``, by torch's allocator and by NVML."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._samples_bytes: list[int] = []
        self._begun = False
        self._context_bytes: int | None = None
        #: Bytes of live tensors. The owner of the meter sets it at the last boundary.
        self.tensors_bytes: int | None = None

    def sample(self) -> None:
        """Record the memory in use."""
        if not self._begun:
            self._begun = True
            self._ask(torch.cuda.reset_peak_memory_stats)
            held_bytes, reserved_bytes = self._held_bytes(), self._ask(torch.cuda.memory_reserved)
            if held_bytes is not None and reserved_bytes is not None:
                self._context_bytes = held_bytes - reserved_bytes
        allocated_bytes = self._ask(torch.cuda.memory_allocated)
        if allocated_bytes is not None:
            self._samples_bytes.append(allocated_bytes)

    def report(self) -> MemoryUse:
        """Return the memory that was recorded."""
        samples = self._samples_bytes
        allocated, reserved = self._ask(torch.cuda.memory_allocated), self._ask(torch.cuda.memory_reserved)
        kept = None if allocated is None or reserved is None else reserved - allocated
        return MemoryUse(
            peak_bytes=self._ask(torch.cuda.max_memory_allocated),
            boundary_bytes=int(median(samples)) if samples else None,
            tensors_bytes=self.tensors_bytes,
            reserved_bytes=kept,
            context_bytes=self._context_bytes,
            unaccounted_bytes=unaccounted(self._held_bytes(), self.tensors_bytes, kept, self._context_bytes),
        )

    def _ask(self, question: Callable[[int], Any]) -> Any:
        """Return a statistic of the allocator on this GPU; None if the allocator keeps no count."""
        return statistics(partial(question, self._index))

    def _held_bytes(self) -> int | None:
        """Return what this process holds by the driver; None if it does not say (containers, WSL)."""
        return own_bytes(str(torch.cuda.get_device_properties(self._index).uuid))
