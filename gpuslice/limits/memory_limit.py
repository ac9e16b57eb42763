"""The limit of the memory that a job may allocate on its device.

On a GPU, torch's allocator applies it. On the host, the kernel does: ``RLIMIT_DATA`` bounds a process's
private writable memory, so that the allocation that exceeds it fails, whatever code makes it. Memory from
before the first lease does not count, nor do snapshots, which are shared mappings. While the job's state is
moving there is no limit, because gpuslice then allocates. Memory of processes that the job starts is deducted
from its limit (``worker_memory``).
"""

from __future__ import annotations

import importlib
import os
import re
import resource
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpuslice.config import format_size, parse_size
from gpuslice.errors import OVER_MEMORY_LIMIT
from gpuslice.kernels.cuda import runtime_calls
from gpuslice.kernels.cuda.allocator_memory import statistics
from gpuslice.limits.worker_memory import Watch, WorkerMemory, bounded, private_bytes
from gpuslice.types import DeviceName

#: Threads whose stacks count in full from their start: ours, and some of the script's.
_THREADS = 8
#: Stack size of glibc's threads if stacks have no limit.
_STACK_BYTES = 2 << 20
_ASKED = re.compile(
    r"(?:tried|Unable) to allocate ([0-9]+(?:[.][0-9]+)?) ?(bytes|[KMGT]?i?B)\b", re.IGNORECASE
)
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)


class MemoryLimit:
    """The limit of this process, and of processes that it starts, on the device that it computes on.

    Parameters
    ----------
    limit
        ``3G`` style; empty: none.
    tell
        Gets what is to be said on stderr.
    """

    def __init__(self, limit: str, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.limit_bytes = parse_size(limit) if limit else 0
        self._device = DeviceName("cpu", None)
        #: On the host: the kernel's limit for this process alone, and its limit without ours.
        self._soft_bytes = 0
        self._former_bytes = resource.RLIM_INFINITY
        #: Memory of the process when the limit was lifted; 0 while it applies.
        self._lifted_bytes = 0
        self._workers = WorkerMemory(0)
        self._watch = Watch(self._share)
        #: Held while the kernel's limit is changed.
        self._lock = threading.Lock()

    def begin(self, device: DeviceName) -> None:
        """Apply the limit from now on; on a GPU as soon as the script begins CUDA."""
        if not self.limit_bytes:
            return
        self._device = device
        if device.kind == "cuda":
            _at_cuda_begin(self._limit_gpu)
        elif device.kind == "cpu":
            if not self._soft_bytes:
                self._begin_host()
            # Anew in a fork that has become the job's rank: it has no thread of its parent's.
            self._lock, self._watch = threading.Lock(), Watch(self._share)
            self._watch.start()

    def end(self) -> None:
        """Stop watching other processes' memory. Called when the script has ended."""
        self._watch.end()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lift the limit on the host until the state is back (``restore``) or the block fails."""
        if self._soft_bytes and not self._lifted_bytes:
            self._lift()
        try:
            yield
        except BaseException:
            self.restore(self._device)
            raise

    def restore(self, device: DeviceName) -> None:
        """Apply the limit again: the state is back, on ``device``. Memory added meanwhile is gpuslice's."""
        if self._lifted_bytes:
            with self._lock:
                ours_bytes = max(0, private_bytes(os.getpid()) - self._lifted_bytes)
                self._soft_bytes = bounded(self._soft_bytes + ours_bytes, self._former_bytes)
                self._lifted_bytes = 0
                self._set_host(self._soft_bytes)
            self._share()
        elif self.limit_bytes and device.kind == "cuda" and device != self._device:
            self._device = device
            _at_cuda_begin(self._limit_gpu)  # a job may have moved before its script begins CUDA

    def explain(self, error: BaseException) -> str:
        """Return an explanation of ``error``, which ends the script, if this limit caused it; else "".

        The limit is lifted then, because reporting takes memory, too.
        """
        text = str(error)
        if OVER_MEMORY_LIMIT in text:
            return ""  # the error explains it already
        if not self.limit_bytes or not (isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text)):
            return ""
        asked, (had_bytes, room_bytes) = asked_bytes(text), self._use()
        if room_bytes is None or (asked and asked <= room_bytes):
            return ""  # the machine lacks memory, or the GPU
        if self._soft_bytes and not self._lifted_bytes:
            self._lift()
        wish = format_size(asked) if asked else "more"
        limit, had = format_size(self.limit_bytes), format_size(had_bytes)
        return (
            f"gpuslice: {OVER_MEMORY_LIMIT} of {limit}: it asked for {wish} and had {had} (submit --memory)"
        )

    def _begin_host(self) -> None:
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module("torch._dynamo")  # what torch needs for itself is not the script's
        first_bytes = private_bytes(os.getpid()) + _stacks_bytes()
        self._former_bytes, hard = resource.getrlimit(resource.RLIMIT_DATA)
        self._soft_bytes = bounded(first_bytes + self.limit_bytes, self._former_bytes, hard)
        self._workers = WorkerMemory(first_bytes)
        self._set_host(self._soft_bytes)

    def _use(self) -> tuple[int, int | None]:
        """Return the job's memory that counts and the memory left; None while no limit is in force."""
        if self._device.kind == "cuda":
            index = self._device.index or 0
            had = statistics(lambda: torch.cuda.memory_reserved(index)) if runtime_calls.has_begun() else 0
            had = had or 0  # an allocator of the script may keep no count
            return had, self.limit_bytes - had
        soft_bytes, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft_bytes in (self._former_bytes, hard):
            return 0, None
        # In a fork, too: what the job had when the room was shared out last, and what the fork took since.
        room_bytes = soft_bytes - private_bytes(os.getpid())
        unused_bytes = min(self.limit_bytes, max(0, room_bytes - _stacks_bytes()))
        return self.limit_bytes - unused_bytes, room_bytes

    def _lift(self) -> None:
        with self._lock:
            self._lifted_bytes = private_bytes(os.getpid())
            self._set_host(self._former_bytes)

    def _share(self) -> int:
        """Give the rest of the limit to all processes of the job. Return how many others there are."""
        with self._lock:
            own_bytes = private_bytes(os.getpid())
            others_bytes = self._workers.taken_bytes(own_bytes)
            if self._lifted_bytes:
                own_bytes = self._lifted_bytes
            else:
                self._set_host(max(0, self._soft_bytes - others_bytes))
            return self._workers.allow(max(0, self._soft_bytes - others_bytes - own_bytes))

    def _set_host(self, soft_bytes: int) -> None:
        """Set the soft limit, within the hard limit, which the script may lower at any time."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (bounded(soft_bytes, hard), hard))

    def _limit_gpu(self) -> None:
        if torch.cuda.get_allocator_backend() == "pluggable":
            lost = f"that of {format_size(self.limit_bytes)} does not hold"
            self._tell(f"the script's own CUDA allocator keeps no memory limit; {lost}")
            return
        index = self._device.index or 0
        total_bytes = torch.cuda.get_device_properties(index).total_memory
        with torch.cuda.device(index):
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit_bytes / total_bytes), index)
        self._word_gpu_errors()

    def _word_gpu_errors(self) -> None:
        """Add the explanation to torch's out-of-memory errors, for scripts that catch them, too."""

        def begin(error: torch.OutOfMemoryError, *words: object) -> None:
            RuntimeError.__init__(error, *words)
            if note := self.explain(error):
                error.args = (f"{error}\n{note}",)

        torch.OutOfMemoryError.__init__ = begin  # type: ignore[assignment, method-assign]


def asked_bytes(text: str) -> int:
    """Return how many bytes were requested, by an out-of-memory error's text; 0 if it does not say."""
    found = _ASKED.search(text)
    if found is None:
        return 0
    return int(float(found[1])) if found[2] == "bytes" else parse_size(f"{found[1]}{found[2]}")


def _stacks_bytes() -> int:
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    each_bytes = _STACK_BYTES if soft_bytes == resource.RLIM_INFINITY else soft_bytes
    return each_bytes * (_THREADS + torch.get_num_threads())


def _at_cuda_begin(act: Any) -> None:
    """Call ``act`` when the script begins CUDA, or now if it has."""
    torch.cuda._lazy_call(act)  # type: ignore[no-untyped-call]
