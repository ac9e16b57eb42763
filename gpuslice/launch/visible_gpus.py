"""Conversion of a scheduler's ``cuda:N`` to a process's ``cuda:M`` and back. Pure functions; no torch.

A rank sees all GPUs that the scheduler sees, so that it can move, but in its own order: the GPU of its first
lease is where the rank's script looks for it. ``CUDA_VISIBLE_DEVICES`` gives CUDA this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuslice.errors import SuspendRefusedError
from gpuslice.types import DeviceName

if TYPE_CHECKING:  # a job has no use for NVML
    from gpuslice.kernels.nvml import Gpu

#: CUDA's variable: numbers or UUIDs of the GPUs that a process sees, in the order of its own numbers.
VISIBLE = "CUDA_VISIBLE_DEVICES"
_MODE_CAUTIONS = {
    "exclusive_process": "exclusive mode lets one process in at a time, and parked jobs keep their contexts",
    "prohibited": "its compute mode lets no process in",
}


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The mapping between a process's CUDA numbers and the scheduler's GPU numbers.

    Attributes
    ----------
    all_gpus
        Words for ``CUDA_VISIBLE_DEVICES`` in the order of the scheduler's numbers; empty if both number the
        GPUs alike.
    order
        The scheduler's numbers, in the order of the process's numbers.
    """

    all_gpus: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    @classmethod
    def for_lease(cls, all_gpus: str, leased: int, *, local_rank: int, own: str) -> VisibleGpus:
        """Return the mapping for a process that has not begun CUDA, whose script names the leased GPU.

        Parameters
        ----------
        all_gpus
            The GPUs that the scheduler shows its jobs.
        leased
            The scheduler's number of the GPU of the first lease.
        local_rank
            The number by which the script names that GPU: 0 alone, ``LOCAL_RANK`` in a gang.
        own
            The script's own value of the variable. A script that shows itself fewer GPUs than there are local
            ranks names its GPU ``cuda:0``.
        """
        words = tuple(all_gpus.split(",")) if all_gpus else ()
        if leased >= len(words):
            return cls()
        place = local_rank if local_rank < min(len(words), len(own.split(","))) else 0
        others = [number for number in range(len(words)) if number != leased]
        return cls(words, (*others[:place], leased, *others[place:]))

    @classmethod
    def as_begun(cls, all_gpus: str, shown: str | None) -> VisibleGpus:
        """Return the mapping for a process that began CUDA while the variable was ``shown``."""
        words = tuple(all_gpus.split(",")) if all_gpus else ()
        if shown is None or not words:
            return cls()
        numbers = []
        for word in shown.replace(" ", "").split(","):
            if word not in words:
                break
            numbers.append(words.index(word))
        return cls(words, tuple(numbers))

    @property
    def variable(self) -> str:
        """The value of ``CUDA_VISIBLE_DEVICES`` for this mapping; empty to leave the variable unchanged."""
        return ",".join(self.all_gpus[number] for number in self.order)

    def inside(self, name: DeviceName) -> DeviceName:
        """Return this process's name of the scheduler's device.

        Raises
        ------
        SuspendRefusedError
            If the process cannot see the device.
        """
        if name.kind != "cuda" or not self.all_gpus:
            return name
        if name.index not in self.order:
            raise SuspendRefusedError(
                f"{name} is hidden from this process, which began CUDA with other GPUs in {VISIBLE}",
                f"leave {VISIBLE} to the scheduler",
            )
        return DeviceName("cuda", self.order.index(name.index))

    def outside(self, name: DeviceName) -> DeviceName:
        """Return the scheduler's name of this process's device."""
        if name.kind != "cuda" or not self.all_gpus or name.index is None or name.index >= len(self.order):
            return name
        return DeviceName("cuda", self.order[name.index])


def hides_all(value: str) -> bool:
    """Return True if ``CUDA_VISIBLE_DEVICES=value`` asks for no GPU: its first entry is empty or negative."""
    first = value.split(",")[0].strip()
    return first == "" or first.startswith("-")


def all_visible(numbers: Sequence[int], shown: str | None) -> str:
    """Return the GPUs that a scheduler shows its jobs: its own ``CUDA_VISIBLE_DEVICES``, or all numbers."""
    return shown.replace(" ", "") if shown is not None else ",".join(map(str, numbers))


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA shows a process with this environment, in the order of their CUDA numbers.

    ``CUDA_VISIBLE_DEVICES`` holds numbers or beginnings of UUIDs; CUDA ignores all from the first unknown one
    on. If MIG divides a GPU, a process sees one instance only: the one named by its own UUID, else the first.
    """
    chosen = environ.get(VISIBLE)
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
    """Return for each visible GPU why jobs cannot share it, or why its name is not certain."""
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
