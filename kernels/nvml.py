"""What the NVIDIA driver says through NVML: GPUs, memory, versions. No torch, no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pynvml

_COMPUTE_MODES: Mapping[int | None, str] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}
_NOT_AVAILABLE = (1 << 64) - 1
#: NVML's handles by UUID without the prefix ``GPU-``.
_handles: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; values that an old driver cannot tell are None.

    Attributes
    ----------
    index
        NVML's number: PCI order, which ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` do not change.
    capability
        CUDA compute capability as ``"9.0"``.
    compute_mode
        ``default``, ``exclusive_process`` or ``prohibited``.
    instances
        What MIG divides it into: each of them is a device to CUDA, and it itself is none any more.
    """

    index: int
    name: str | None
    uuid: str | None
    capability: str | None
    total_bytes: int | None
    used_bytes: int | None
    compute_mode: str | None = None
    instances: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver and its GPUs.

    Attributes
    ----------
    version
        ``"580.65.06"``, or ``None`` without a driver.
    cuda
        The newest CUDA that it serves, ``"13.0"``.
    problem
        Why there is nothing to tell, or empty.
    """

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""

    @property
    def major(self) -> int:
        """First part of the version; 0 without a driver."""
        head = (self.version or "").split(".")[0]
        return int(head) if head.isdigit() else 0


def read_driver() -> Driver:
    """Ask NVML once, and return the driver and its GPUs. Without a driver, ``problem`` says why."""
    if problem := _begin():
        return Driver(problem=f"NVML: {problem}")
    try:
        return Driver(
            _text(_ask("nvmlSystemGetDriverVersion")),
            _cuda(_ask("nvmlSystemGetCudaDriverVersion_v2")),
            tuple(_gpu(index) for index in range(_ask("nvmlDeviceGetCount") or 0)),
        )
    finally:
        _ask("nvmlShutdown")


def own_bytes(uuid: str) -> int | None:
    """Return how much memory of a GPU this process holds, context and libraries included.

    Return None if NVML cannot tell.

    Parameters
    ----------
    uuid
        With or without its prefix ``GPU-``.
    """
    handle = _handle(uuid.removeprefix("GPU-"))
    return None if handle is None else _bytes_on(handle, os.getpid())


def bytes_of_process(pid: int) -> dict[str, int]:
    """Return a process's memory on each GPU, context included, by UUID, as far as NVML tells."""
    if _begin():
        return {}
    found: dict[str, int] = {}
    try:
        for index in range(_ask("nvmlDeviceGetCount") or 0):
            handle = _ask("nvmlDeviceGetHandleByIndex", index)
            if handle is not None and (nbytes := _bytes_on(handle, pid)) is not None:
                found[_text(_ask("nvmlDeviceGetUUID", handle)) or f"GPU {index}"] = nbytes
    finally:
        _ask("nvmlShutdown")
    return found


class ProcessReader:
    """Asks NVML which processes use a GPU. NVML stays open: to open it costs more than to ask."""

    def __init__(self) -> None:
        self.problem = _begin()

    def read(self, gpu: Gpu) -> dict[int, int | None]:
        """Return the bytes of each process on a GPU, or on an instance of MIG; None for a size not known.

        Clients of MPS are among them. Of a GPU that does not answer, nothing is told.
        """
        if self.problem:
            return {}
        handle = self._handle(gpu)
        found: dict[int, int | None] = {}
        for question in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetMPSComputeRunningProcesses",
        ):
            for process in (_ask(question, handle) if handle is not None else None) or ():
                found[int(process.pid)] = _bytes_of(process)
        return found

    def _handle(self, gpu: Gpu) -> object | None:
        is_instance = (gpu.uuid or "").startswith("MIG-")
        by, name = ("UUID", gpu.uuid) if is_instance else ("Index", gpu.index)
        handle: object | None = _ask(f"nvmlDeviceGetHandleBy{by}", name)
        return handle


def _bytes_on(handle: object, pid: int) -> int | None:
    """Return the memory of one GPU that a process has, or None if NVML cannot tell."""
    processes = _ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    sizes = [_bytes_of(process) for process in processes if process.pid == pid]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _bytes_of(process: object) -> int | None:
    """Return the memory of one of NVML's processes, or None if NVML cannot tell."""
    size = getattr(process, "usedGpuMemory", None)
    # An old binding hands on the driver's number for "not available", which no GPU has.
    return None if size is None or size >= _NOT_AVAILABLE else int(size)


def _handle(uuid: str) -> object | None:
    """Return NVML's handle of a GPU, or None. NVML stays open: to open it costs more than to ask."""
    if uuid not in _handles:
        if _begin():
            return None
        for index in range(_ask("nvmlDeviceGetCount") or 0):
            handle = _ask("nvmlDeviceGetHandleByIndex", index)
            found = _text(_ask("nvmlDeviceGetUUID", handle)) if handle is not None else None
            if found:
                _handles[found.removeprefix("GPU-")] = handle
    return _handles.get(uuid)


def _gpu(index: int) -> Gpu:
    handle = _ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(index, None, None, None, None, None)
    mode = _ask("nvmlDeviceGetComputeMode", handle)
    return replace(
        _described(index, handle), compute_mode=_COMPUTE_MODES.get(mode), instances=_instances(index, handle)
    )


def _instances(index: int, handle: object) -> tuple[Gpu, ...]:
    mode = _ask("nvmlDeviceGetMigMode", handle)
    if mode is None or not mode[0]:
        return ()
    count = _ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    found = [_ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number) for number in range(count)]
    return tuple(_described(index, instance) for instance in found if instance is not None)


def _described(index: int, handle: object) -> Gpu:
    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    capability = _ask("nvmlDeviceGetCudaComputeCapability", handle)
    return Gpu(
        index,
        _text(_ask("nvmlDeviceGetName", handle)),
        _text(_ask("nvmlDeviceGetUUID", handle)),
        None if capability is None else f"{capability[0]}.{capability[1]}",
        None if memory is None else int(memory.total),
        None if memory is None else int(memory.used),
    )


def _begin() -> str:
    """Open NVML and return an empty string, or why that is not possible."""
    try:
        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - see `_ask`
        return str(error) or type(error).__name__
    return ""


def _ask(question: str, *arguments: object) -> Any:
    """Return the answer of one of NVML's functions, or None if this driver, binding or GPU has none.

    A failed question must not fail a training, so every exception becomes None. Not all are ``NVMLError``: an
    old binding lacks the function, a binding newer than the driver raises ``NVMLLibraryMismatchError``, a
    damaged library ``OSError``, and a name may not be valid text.
    """
    try:
        return getattr(pynvml, question)(*arguments)
    except Exception:  # noqa: BLE001 - None is the answer, and every caller deals with it
        return None


def _text(name: str | bytes | None) -> str | None:
    """Return a name as text: old bindings give bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _cuda(number: int | None) -> str | None:
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"
