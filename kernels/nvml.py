"""What the NVIDIA driver says through NVML: GPUs, memory, versions. No torch, no CUDA context."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import pynvml

_COMPUTE_MODES: Mapping[int | None, str] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; what an old driver cannot tell is ``None``.

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
        """The first part of the version; 0 without a driver."""
        head = (self.version or "").split(".")[0]
        return int(head) if head.isdigit() else 0


def read_driver() -> Driver:
    """Ask NVML once. Without a driver the answer says why, and nothing is raised."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Driver(problem=f"NVML: {error}")
    try:
        count = _ask(pynvml.nvmlDeviceGetCount) or 0
        return Driver(
            _ask(pynvml.nvmlSystemGetDriverVersion),
            _cuda(_ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)),
            tuple(_gpu(index) for index in range(count)),
        )
    finally:
        pynvml.nvmlShutdown()


def own_bytes(uuid: str) -> int | None:
    """Memory of a GPU that this process has, context and libraries included; ``None`` if NVML cannot tell.

    Parameters
    ----------
    uuid
        With or without its prefix ``GPU-``.
    """
    try:
        handle = _handle(uuid.removeprefix("GPU-"))
    except pynvml.NVMLError:
        return None
    return None if handle is None else _bytes_on(handle, os.getpid())


def bytes_of_process(pid: int) -> dict[str, int]:
    """What a process has on each GPU, by UUID, context and libraries included, as far as NVML tells it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    found: dict[str, int] = {}
    try:
        for index in range(_ask(pynvml.nvmlDeviceGetCount) or 0):
            handle = _ask(functools.partial(pynvml.nvmlDeviceGetHandleByIndex, index))
            if handle is None or (nbytes := _bytes_on(handle, pid)) is None:
                continue
            found[str(_ask(functools.partial(pynvml.nvmlDeviceGetUUID, handle)))] = nbytes
    finally:
        pynvml.nvmlShutdown()
    return found


def _bytes_on(handle: object, pid: int) -> int | None:
    """Memory of one GPU that a process has; ``None`` if NVML cannot tell."""
    processes = _ask(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    sizes = [process.usedGpuMemory for process in processes or [] if process.pid == pid]
    return int(sizes[0]) if sizes and sizes[0] is not None else None


@functools.cache
def _handle(uuid: str) -> object | None:
    """NVML stays open for it: to open it costs more than to ask."""
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle: object = pynvml.nvmlDeviceGetHandleByIndex(index)
        if str(pynvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-") == uuid:
            return handle
    return None


def _gpu(index: int) -> Gpu:
    handle = _ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return Gpu(index, None, None, None, None, None)
    mode = _ask(lambda: pynvml.nvmlDeviceGetComputeMode(handle))
    return replace(
        _described(index, handle), compute_mode=_COMPUTE_MODES.get(mode), instances=_instances(index, handle)
    )


def _instances(index: int, handle: object) -> tuple[Gpu, ...]:
    mode = _ask(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if mode is None or not mode[0]:
        return ()
    count = _ask(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    found = [
        _ask(functools.partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number))
        for number in range(count)
    ]
    return tuple(_described(index, instance) for instance in found if instance is not None)


def _described(index: int, handle: object) -> Gpu:
    memory = _ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    capability = _ask(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Gpu(
        index,
        _ask(lambda: pynvml.nvmlDeviceGetName(handle)),
        _ask(lambda: pynvml.nvmlDeviceGetUUID(handle)),
        None if capability is None else f"{capability[0]}.{capability[1]}",
        None if memory is None else int(memory.total),
        None if memory is None else int(memory.used),
    )


def _ask(question: Callable[[], _T]) -> _T | None:
    """One answer, or ``None`` where this driver or GPU has none: symbols are looked up call by call."""
    try:
        return question()
    except pynvml.NVMLError:
        return None


def _cuda(number: int | None) -> str | None:
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"
