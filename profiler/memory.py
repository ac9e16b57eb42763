"""The memory of a job: its peak, its level at boundaries, and its parts."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from statistics import median

import msgspec

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Written to ``clear_refs`` of proc(5): resets the peak of the resident memory.
_RESET_PEAK = b"5"


def reset_peak() -> None:
    """Count the peak of this process's resident memory from now on, if the kernel can."""
    with suppress(OSError):  # a kernel without it counts the peak from the beginning
        Path("/proc/self/clear_refs").write_bytes(_RESET_PEAK)


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of mallinfo(3), glibc."""

    _fields_ = [
        *((f"_{number}", ctypes.c_size_t) for number in range(8)),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def free_heap_bytes() -> int | None:
    """Return the freed memory that the C library's heaps keep; None if it does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Heap
    return int(ask().fordblks)


class MemoryUse(msgspec.Struct, frozen=True):
    """Bytes of one process on one device. None: this device or driver does not say.

    Attributes
    ----------
    peak_bytes
        The most that was in use at once since the first boundary.
    boundary_bytes
        In use at boundaries: the median.
    tensors_bytes
        What live tensors hold at the last boundary.
    reserved_bytes
        What the allocator keeps beyond what is in use.
    context_bytes
        What the process held before it had any tensor: libraries, and on a GPU the CUDA context.
    unaccounted_bytes
        Bytes held at the last boundary beyond tensors, reserve and context.
    """

    peak_bytes: int | None
    boundary_bytes: int | None
    tensors_bytes: int | None
    reserved_bytes: int | None
    context_bytes: int | None
    unaccounted_bytes: int | None


def unaccounted(held_bytes: int | None, *parts_bytes: int | None) -> int | None:
    """Return the bytes held beyond the parts, at least 0; None if any of them is unknown."""
    known = [part for part in parts_bytes if part is not None]
    if held_bytes is None or len(known) < len(parts_bytes):
        return None
    return max(0, held_bytes - sum(known))


class HostMemory:
    """The anonymous resident memory of this process. Make the object before the script has any tensor."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._context_bytes = self._anonymous_bytes()
        self._samples_bytes: list[int] = []
        #: Bytes of live tensors. The owner of the meter sets it at the last boundary.
        self.tensors_bytes: int | None = None

    def sample(self) -> None:
        """Record the memory in use."""
        if not self._samples_bytes:
            reset_peak()
        self._samples_bytes.append(self._anonymous_bytes())

    def report(self) -> MemoryUse:
        """Return the memory that was recorded."""
        held_bytes, free = self._anonymous_bytes(), free_heap_bytes()
        samples = self._samples_bytes
        os.close(self._statm)
        return MemoryUse(
            peak_bytes=peak_anonymous_bytes(),
            boundary_bytes=int(median(samples)) if samples else None,
            tensors_bytes=self.tensors_bytes,
            reserved_bytes=free,
            context_bytes=self._context_bytes,
            unaccounted_bytes=unaccounted(held_bytes, self.tensors_bytes, free, self._context_bytes),
        )

    def _anonymous_bytes(self) -> int:
        """Return ``resident - shared`` of statm. Shared are files and shared memory."""
        fields = os.pread(self._statm, 128, 0).split()
        return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def peak_anonymous_bytes() -> int | None:
    """Return the peak of the resident memory, without the present files and shared memory."""
    kilobytes: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "RssFile", "RssShmem"):
            kilobytes[name] = int(value.split()[0])
    if "VmHWM" not in kilobytes:
        return None
    return 1024 * (kilobytes["VmHWM"] - kilobytes.get("RssFile", 0) - kilobytes.get("RssShmem", 0))
