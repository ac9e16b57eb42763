"""What the NVIDIA driver says through NVML: GPUs, memory, versions. No torch, no CUDA context."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import pynvml

_COMPUTE_MODES: Mapping[int | None, str] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}
_MODE_CAUTIONS = {
    "exclusive_process": "exclusive mode lets one process in at a time, and parked jobs keep their contexts",
    "prohibited": "its compute mode lets no process in",
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
        processes = None if handle is None else pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    sizes = [process.usedGpuMemory for process in processes or [] if process.pid == os.getpid()]
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


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA shows a process with this environment, in the order of their CUDA numbers.

    ``CUDA_VISIBLE_DEVICES`` holds numbers or beginnings of UUIDs; CUDA ignores everything from the first
    that it does not know. Of what MIG divides, a process sees one instance only: the one that is named by
    its own UUID, else the first.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [_first_instance(gpu) for gpu in gpus]
    found: list[Gpu] = []
    for word in chosen.replace(" ", "").split(","):
        if word.startswith("MIG-"):
            instances = [one for gpu in gpus for one in gpu.instances if (one.uuid or "").startswith(word)]
            return [*found, *instances] if len(instances) == 1 else found
        matching = [
            gpu for gpu in gpus if word and (word == str(gpu.index) or (gpu.uuid or "").startswith(word))
        ]
        if len(matching) != 1:
            break
        found.append(_first_instance(matching[0]))
    return found


def _first_instance(gpu: Gpu) -> Gpu:
    return gpu.instances[0] if gpu.instances else gpu


def cautions(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[tuple[str, ...]]:
    """For each of ``visible(gpus, environ)``: what keeps jobs from sharing it or its name from being sure."""
    whole = {gpu.index: gpu for gpu in gpus}
    mixed = len({gpu.name for gpu in gpus}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    found = []
    for gpu in visible(gpus, environ):
        own = []
        mode = whole[gpu.index].compute_mode
        if mode in _MODE_CAUTIONS:
            own.append(f"{_MODE_CAUTIONS[mode]}; set it to default: nvidia-smi -i {gpu.index} -c 0")
        if whole[gpu.index].instances:
            own.append(
                f"a MIG instance of GPU {gpu.index}: a process sees only one; name it in CUDA_VISIBLE_DEVICES"
            )
        if mixed:
            own.append(
                "the GPUs are of different models, and CUDA may number them otherwise, the fastest first; "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
        found.append(tuple(own))
    return found
