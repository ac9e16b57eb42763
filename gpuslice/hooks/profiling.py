"""Profiles a job in its own process: records its steps, and ends the script when there are enough."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from gpuslice.checkpoint.discover.storages import sweep
from gpuslice.errors import SuspendRefusedError
from gpuslice.files import replace_file
from gpuslice.launch.command import rank_path
from gpuslice.launch.step_control import StepControl
from gpuslice.profiler.memory import HostMemory
from gpuslice.profiler.recorder import StepRecorder
from gpuslice.runtime.ending import at_end, say
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.trainable import Optimizers

_Fetch = Callable[[Any], Any]


def install(runtime: Runtime) -> None:
    """Record a profile of this process. Call this before the boundary hooks: steps come before boundaries."""
    profiling = Profiling(runtime)
    for kind in (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter):
        kind._next_data = profiling.timed(kind._next_data)  # type: ignore[method-assign]
    register_optimizer_step_post_hook(profiling.stepped)
    runtime.boundaries.recorder = profiling.at_boundary
    at_end(profiling.write, os.getpid())


class Profiling:
    """The recording of one rank.

    Parameters
    ----------
    runtime
        The rank's runtime. Its settings say how many steps to record, and to which file.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._host_memory = HostMemory()
        self._memory: Any = self._host_memory
        self._recorder: StepRecorder | None = None
        self._optimizers = Optimizers()
        self._thread = runtime.boundaries.thread
        self._wanted = runtime.settings.profile_steps
        self._written = False
        self._control: StepControl | None = None

    def timed(self, fetch: _Fetch) -> _Fetch:
        """Return a DataLoader's ``fetch``, wrapped to record how long the training thread waits in it."""

        def fetching(iterator: Any) -> Any:
            recorder = self._recorder
            if recorder is None or threading.get_ident() != self._thread.ident:
                return fetch(iterator)
            since_s = perf_counter()
            try:
                batch = fetch(iterator)
            except BaseException:
                recorder.exhausted(since_s)
                raise
            recorder.fetched(since_s, grad=torch.is_grad_enabled())
            return batch

        return fetching

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Record that a step of ``optimizer`` has ended."""
        if torch.compiler.is_compiling() or self._recorder is None:
            return
        self._optimizers.saw(optimizer)
        if threading.get_ident() == self._thread.ident:
            self._recorder.stepped()

    def at_boundary(self, boundary: int) -> None:
        """Record a boundary, and end the script if enough steps are recorded.

        Raises
        ------
        SystemExit
            With exit status 0. ``finally`` blocks and exit handlers run.
        """
        if self._recorder is None:
            self._recorder = self._begin()
        boundaries = self._runtime.boundaries
        self._recorder.boundary(boundary if boundaries.explicit else boundaries.steps)
        intervals = self._recorder.intervals
        asked = self._control is not None and self._control.passed(intervals)
        if asked or (self._wanted and intervals >= self._wanted):
            boundaries.recorder = None
            self.write(os.getpid())
            say(f"{intervals} steps are recorded; the script ends here")
            sys.exit(0)

    def write(self, pid: int) -> None:
        """Write the recording to its file, once. Nothing is written in a process other than ``pid``."""
        if self._written or os.getpid() != pid:
            return
        self._written = True
        if self._recorder is None:
            self._recorder = StepRecorder()
        self._memory.tensors_bytes = self._tensors_bytes()
        recording = self._recorder.finish(self._runtime.identity.rank, self._optimizers.skew())
        path = self._path()
        try:
            replace_file(path, msgspec.json.encode(recording))
        except OSError as error:
            say(f"cannot write the profile {path}: {error.strerror}")

    def _path(self) -> Path:
        return rank_path(Path(self._runtime.settings.profile), self._runtime.identity.rank)

    def _begin(self) -> StepRecorder:
        """Return a new recorder at the first boundary. It measures the GPU if the script uses one by then."""
        self._control = StepControl.beside(self._path())
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return StepRecorder(self._host_memory)
        from gpuslice.profiler.gpu_measuring import CudaClock, CudaMemory

        self._memory = CudaMemory(torch.cuda.current_device())
        return StepRecorder(self._memory, CudaClock())

    def _tensors_bytes(self) -> int | None:
        self._runtime.suspension.obstacle()  # finds out which device it is
        with suppress(SuspendRefusedError):  # a captured graph, or several devices
            return sum(one.nbytes for one in sweep(self._runtime.suspension.in_use.device))
        return None
