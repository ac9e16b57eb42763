"""The streams and kernels of one GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpuslice.errors import EnvironmentUnusableError

from . import runtime_calls
from .kernels import GpuKernels, Pieces, combine, table

#: A GPU has one copy engine per direction. A second stream hides the gap between two copies.
_LANES = 2


class CudaLane:
    """A stream during one copy. Work that is queued on it happens in order, and later."""

    def __init__(self, stream: torch.cuda.Stream, engine: CudaEngine) -> None:
        self._stream = stream
        self._engine = engine
        #: Tables on their way to the GPU. They must outlive the copy on machines whose GPU reads them itself.
        self._tables: list[torch.Tensor] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between two tensors of bytes."""
        with runtime_calls.outside_captures(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def staging(self, nbytes: int) -> torch.Tensor | None:
        """Return zeroed device memory for this lane, or None if too little is free.

        It is zeroed, so that padding copied between two storages reveals no other memory.

        The calling thread's stream allocates it: memory that this lane's stream had allocated would be lost
        to the job afterwards. It is dropped when the lane is idle.
        """
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._stream.device)
        except torch.OutOfMemoryError:
            return None
        # Work that used this memory before may still be running.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            return buffer.zero_()

    def checksums(self, pieces: Pieces) -> list[int] | None:
        """Return the XXH3-128 of pieces (address, padded bytes, bytes); None if too little memory is free."""
        try:
            with torch.cuda.stream(self._stream):
                words = torch.zeros(2 * len(pieces), dtype=torch.int64, device=self._stream.device)
                self.launch("checksum", pieces, words)
                return combine(words.cpu().numpy().view(np.uint64))
        except torch.OutOfMemoryError:
            return None

    def follow(self, other: CudaLane) -> None:
        """Make all work queued here from now on wait for the work queued on ``other`` so far."""
        self._stream.wait_stream(other._stream)

    def record_event(self) -> Callable[[], None]:
        """Return a function that waits until all work queued so far is done."""
        # Blocking, not spinning: other jobs need the host's cores, too.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)

        def wait() -> None:
            with runtime_calls.outside_captures():  # in whatever thread
                event.synchronize()

        return wait

    def wait(self) -> None:
        """Wait until all work on the lane is done."""
        self._stream.synchronize()

    def launch(self, name: str, pieces: Pieces, target: torch.Tensor) -> None:
        """Queue a kernel over pieces of device memory, see `GpuKernels.launch`."""
        self._tables.append(torch.from_numpy(table(pieces)))
        with runtime_calls.outside_captures(), torch.cuda.stream(self._stream):
            rows = self._tables[-1].to(self._stream.device, non_blocking=True)
            self._engine.kernels.launch(
                name, rows.data_ptr(), pieces, target.data_ptr(), self._stream.cuda_stream
            )


class CudaEngine:
    """One GPU's lanes; streams are made once, kernels are loaded when first needed.

    Parameters
    ----------
    index
        Torch's number of the GPU.

    Attributes
    ----------
    kernels
        There once `kernels_missing` has said that none are missing.
    """

    kernels: GpuKernels

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._streams: list[torch.cuda.Stream] = []
        self._missing: str | None = None

    def lanes(self) -> Sequence[CudaLane]:
        """Return the lanes of one copy. Their work follows what the calling thread has queued so far."""
        with self._lock:
            if not self._streams:
                self._streams = [runtime_calls.make_stream(self._index) for _ in range(_LANES)]
        current = torch.cuda.current_stream(self._index)
        for stream in self._streams:
            stream.wait_stream(current)
        return [CudaLane(stream, self) for stream in self._streams]

    def kernels_missing(self) -> str:
        """Return why there are no kernels, or an empty string once they are loaded.

        Compiles them (seconds, once per machine: CuPy keeps them) and loads them. Call it before the first
        copy, which would otherwise take as long.
        """
        with self._lock:
            if self._missing is None:
                try:
                    with runtime_calls.on_gpu(self._index):
                        self.kernels = GpuKernels()
                    self._missing = ""
                except EnvironmentUnusableError as error:
                    self._missing = error.message
            return self._missing
