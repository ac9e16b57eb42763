"""What the NVIDIA driver says through NVML: GPUs, memory, versions. No torch, no CUDA context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pynvml

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
    """

    index: int
    name: str | None
    uuid: str | None
    capability: str | None
    total_bytes: int | None
    used_bytes: int | None


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


def _gpu(index: int) -> Gpu:
    handle = _ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return Gpu(index, None, None, None, None, None)
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
    that it does not know.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(gpus)
    found: list[Gpu] = []
    for word in chosen.replace(" ", "").split(","):
        matching = [
            gpu for gpu in gpus if word and (word == str(gpu.index) or (gpu.uuid or "").startswith(word))
        ]
        if len(matching) != 1:
            break
        found += matching
    return found
