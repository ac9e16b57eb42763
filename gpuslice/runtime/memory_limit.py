"""The limit of what a job may allocate on its device, kept where it allocates.

On a GPU torch's allocator keeps it. On the host the kernel does: ``RLIMIT_DATA`` bounds a process's private
writable memory, so that the very allocation that goes beyond fails, whoever makes it. What the process had
before its first lease does not count, nor do snapshots, which are shared mappings; and while the job's state
is on the move there is no limit, because then gpuslice allocates.
"""

from __future__ import annotations

import importlib
import re
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpuslice.config import format_size, parse_size
from gpuslice.errors import OVER_MEMORY_LIMIT
from gpuslice.kernels.cuda import runtime_calls
from gpuslice.kernels.cuda.allocator_memory import statistics
from gpuslice.runtime.ending import say
from gpuslice.types import DeviceName

#: Threads whose stacks are counted in full from their start on: ours, and some of the script's.
_THREADS = 8
#: Where nothing limits stacks, glibc's threads have this.
_STACK_BYTES = 2 << 20
_ASKED = re.compile(r"(?:tried|Unable) to allocate ([0-9.]+) ?(bytes|[KMGT]?i?B)\b", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)


class MemoryLimit:
    """Of this process, on the device that it computes on.

    Parameters
    ----------
    limit
        ``3G`` style; empty: none.
    """

    def __init__(self, limit: str) -> None:
        self.limit_bytes = parse_size(limit) if limit else 0
        self._device = DeviceName("cpu", None)
        #: The host's: what the process had before, and the kernel's limit now and without ours.
        self._base_bytes = self._soft_bytes = 0
        #: What it had when the limit was lifted; 0: it is kept.
        self._lifted_bytes = 0
        self._former_bytes = resource.RLIM_INFINITY

    def begin(self, device: DeviceName) -> None:
        """Keep it from now on; on a GPU from the moment when the script begins CUDA."""
        if not self.limit_bytes:
            return
        self._device = device
        if device.kind == "cuda":
            _at_cuda_begin(self._limit_gpu)
        elif device.kind == "cpu" and not self._soft_bytes:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module("torch._dynamo")  # what torch needs for itself is not the script's
            self._base_bytes = private_bytes() + _stacks_bytes()
            self._former_bytes, hard = resource.getrlimit(resource.RLIMIT_DATA)
            bounds = [bound for bound in (self._former_bytes, hard) if bound != resource.RLIM_INFINITY]
            self._soft_bytes = min([self._base_bytes + self.limit_bytes, *bounds])
            self._set_host(self._soft_bytes)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """No limit on the host from here on, until the state is back (``restore``) or the block fails."""
        if self._soft_bytes and not self._lifted_bytes:
            self._lifted_bytes = private_bytes()
            self._set_host(self._former_bytes)
        try:
            yield
        except BaseException:
            self.restore(self._device)
            raise

    def restore(self, device: DeviceName) -> None:
        """Keep it again: the state is back, on ``device``. What the process has more now is ours."""
        if self._lifted_bytes:
            own_bytes = max(0, private_bytes() - self._lifted_bytes)
            self._base_bytes += own_bytes
            self._soft_bytes += own_bytes
            self._lifted_bytes = 0
            self._set_host(self._soft_bytes)
        elif self.limit_bytes and device.kind == "cuda" and device != self._device:
            self._device = device
            self._limit_gpu()

    def explain(self, error: BaseException) -> str:
        """What to say of ``error``, which ends the script, if it comes of this limit; else nothing.

        The limit is kept no longer: to say it takes memory, too.
        """
        text = str(error)
        if OVER_MEMORY_LIMIT in text:
            return ""  # it says so itself
        if not self.limit_bytes or not (isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text)):
            return ""
        asked, had_bytes = asked_bytes(text), self._had_bytes()
        if asked and had_bytes + asked <= self.limit_bytes:
            return ""  # the machine lacks memory, or the GPU
        if self._soft_bytes:
            self._set_host(self._former_bytes)
        wish = format_size(asked) if asked else "more"
        limit, had = format_size(self.limit_bytes), format_size(had_bytes)
        return (
            f"gpuslice: {OVER_MEMORY_LIMIT} of {limit}: it asked for {wish} and had {had} (submit --memory)"
        )

    def _had_bytes(self) -> int:
        """What the job has now of what counts."""
        if self._device.kind == "cuda":
            index = self._device.index or 0
            had = statistics(lambda: torch.cuda.memory_reserved(index)) if runtime_calls.has_begun() else 0
            return had or 0  # an allocator of the script's own keeps no count
        return max(0, private_bytes() - self._base_bytes) if self._base_bytes else 0

    def _set_host(self, soft_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, _hard()))

    def _limit_gpu(self) -> None:
        if torch.cuda.get_allocator_backend() == "pluggable":
            limit = format_size(self.limit_bytes)
            say(f"the script's own CUDA allocator keeps no memory limit; that of {limit} does not hold")
            return
        index = self._device.index or 0
        total_bytes = torch.cuda.get_device_properties(index).total_memory
        with torch.cuda.device(index):
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit_bytes / total_bytes), index)
        self._word_gpu_errors()

    def _word_gpu_errors(self) -> None:
        """Let torch's out-of-memory errors say it themselves, also to a script that catches them."""

        def begin(error: torch.OutOfMemoryError, *words: object) -> None:
            RuntimeError.__init__(error, *words)
            if note := self.explain(error):
                error.args = (f"{error}\n{note}",)

        torch.OutOfMemoryError.__init__ = begin  # type: ignore[assignment, method-assign]


def private_bytes() -> int:
    """What ``RLIMIT_DATA`` counts of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def asked_bytes(text: str) -> int:
    """How much an out-of-memory error says was asked for; 0 if it does not say."""
    found = _ASKED.search(text)
    if found is None:
        return 0
    return int(float(found[1])) if found[2] == "bytes" else parse_size(f"{found[1]}{found[2]}")


def _stacks_bytes() -> int:
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    each_bytes = _STACK_BYTES if soft_bytes == resource.RLIM_INFINITY else soft_bytes
    return each_bytes * (_THREADS + torch.get_num_threads())


def _hard() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[1]


def _at_cuda_begin(act: Any) -> None:
    """Call ``act`` when the script begins CUDA, or now if it has."""
    torch.cuda._lazy_call(act)  # type: ignore[no-untyped-call]
