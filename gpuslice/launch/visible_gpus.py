"""The one place where a scheduler's ``cuda:N`` becomes a process's ``cuda:M``, and back. Pure; no torch.

A rank sees all GPUs that the scheduler sees, so that it can move, but in an order of its own: the one that it
was leased first comes where the rank's script looks for it. ``CUDA_VISIBLE_DEVICES`` says so to CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuslice.errors import SuspendRefusedError
from gpuslice.types import DeviceName

#: CUDA's variable: numbers or UUIDs of what a process sees, in the order of its own numbers.
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """How a process numbers the scheduler's GPUs.

    Attributes
    ----------
    all_gpus
        Words for ``CUDA_VISIBLE_DEVICES`` in the order of the scheduler's numbers; empty where the two number
        alike.
    order
        The scheduler's numbers, in the order of the process's.
    """

    all_gpus: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    @classmethod
    def for_lease(cls, all_gpus: str, leased: int, *, local_rank: int, own: str) -> VisibleGpus:
        """The order for a process that has yet to begin CUDA.

        Parameters
        ----------
        all_gpus
            What the scheduler shows its jobs.
        leased
            The scheduler's number of the GPU of the first lease.
        local_rank
            Where scripts look for it: ``cuda:0`` alone, ``cuda:{LOCAL_RANK}`` in a gang.
        own
            What the script has set the variable to: who shows himself fewer GPUs than there are local ranks
            looks for his at ``cuda:0``.
        """
        words = tuple(all_gpus.split(",")) if all_gpus else ()
        if leased >= len(words):
            return cls()
        place = local_rank if local_rank < min(len(words), len(own.split(","))) else 0
        others = [number for number in range(len(words)) if number != leased]
        return cls(words, (*others[:place], leased, *others[place:]))

    @classmethod
    def as_begun(cls, all_gpus: str, shown: str | None) -> VisibleGpus:
        """The order in a process whose CUDA has begun while the variable was ``shown``."""
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
        """The value of ``CUDA_VISIBLE_DEVICES``; empty to leave it as it is."""
        return ",".join(self.all_gpus[number] for number in self.order)

    def inside(self, name: DeviceName) -> DeviceName:
        """What this process calls the scheduler's device.

        Raises
        ------
        SuspendRefusedError
            If the process cannot see it.
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
        """What the scheduler calls this process's device."""
        if name.kind != "cuda" or not self.all_gpus or name.index is None or name.index >= len(self.order):
            return name
        return DeviceName("cuda", self.order[name.index])


def hides_all(value: str) -> bool:
    """Whether a script that sets the variable so wants no GPU: CUDA ignores all from an unknown one on."""
    first = value.split(",")[0].strip()
    return first == "" or first.startswith("-")


def all_visible(numbers: Sequence[int], shown: str | None) -> str:
    """What a scheduler shows its jobs: what it was shown itself, or else all that there are."""
    return shown.replace(" ", "") if shown is not None else ",".join(map(str, numbers))
