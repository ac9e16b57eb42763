"""Several GPUs of one process as one device: one snapshot, and all of them copy at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

import torch

from gpuslice.kernels.device import Device, DeviceMemory, Hold
from gpuslice.kernels.host.copies import run
from gpuslice.kernels.transfer import Inspector, Marks, Pairs, Transfer
from gpuslice.kernels.undo import undone_by
from gpuslice.types import DeviceName

from .device import CudaDevice, kept_by


class CudaGroup(Device):
    """``cuda:0+1``: the GPUs over which one process has divided its model.

    What is asked of it is asked of every GPU, for the storages that are there; the first one stands for all
    where there can be only one, and is where the process computes unless its script says otherwise. A state
    on several GPUs does not move.

    Raises
    ------
    EnvironmentUnusableError
        If torch does not see all of these GPUs.
    """

    def __init__(self, name: DeviceName) -> None:
        self.name = name
        self._members = [CudaDevice(one) for one in name.apart()]
        self._first = self._members[0]
        self.torch_device = self._first.torch_device
        self.obstacles = self._first.obstacles

    @property
    def memory_node(self) -> int | None:
        """Of all GPUs if it is the same one."""
        nodes = {member.memory_node for member in self._members}
        return nodes.pop() if len(nodes) == 1 else None

    def pin(self) -> None:
        self._first.pin()

    def synchronize(self) -> None:
        for member in self._members:
            member.synchronize()

    def check_idle(self) -> None:
        self._first.check_idle()

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return any(member.owns(storage) for member in self._members)

    def memory(self) -> DeviceMemory:
        """The sums over all GPUs."""
        found = [member.memory() for member in self._members]
        counts = [one.allocated_bytes for one in found]
        return DeviceMemory(
            sum(one.total_bytes for one in found),
            sum(one.used_bytes for one in found),
            None if None in counts else sum(count or 0 for count in counts),
            sum(one.reserved_bytes for one in found),
        )

    def held(self, gone_bytes: int) -> dict[str, int]:
        return kept_by(self.name.indices, gone_bytes)

    def holds(self, storages: Sequence[torch.UntypedStorage], *, fixed: Set[int], alone: bool) -> list[Hold]:
        """Addresses of different GPUs differ, so the first one judges for all."""
        return self._first.holds(storages, fixed=fixed, alone=alone)

    def regions(self, storages: Sequence[torch.UntypedStorage]) -> list[int]:
        found = [0] * len(storages)
        for member, places in self._divided([storage.device for storage in storages]):
            regions = member.regions([storages[place] for place in places])
            for place, region in zip(places, regions, strict=True):
                found[place] = region
        return found

    def copy_out(
        self, pairs: Pairs, arena: memoryview, inspect: Inspector | None = None, marks: Marks | None = None
    ) -> Transfer:
        return self._at_once(pairs, lambda member, its: member.copy_out(its, arena, inspect, marks))

    def copy_in(self, pairs: Pairs, arena: memoryview, inspect: Inspector | None = None) -> Transfer:
        return self._at_once(pairs, lambda member, its: member.copy_in(its, arena, inspect))

    def _at_once(self, pairs: Pairs, copy: Callable[[CudaDevice, Pairs], Transfer]) -> Transfer:
        """Every GPU by a thread of its own, which waits for it; returns when all are at rest."""
        divided = list(self._divided([storage.device for storage, _ in pairs]))
        done: list[Transfer] = []

        def work(part: tuple[CudaDevice, list[int]]) -> None:
            member, places = part
            done.append(copy(member, [pairs[place] for place in places]))

        run([[part] for part in divided], work, len(divided))
        return sum(done, Transfer())

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for member, places in self._divided([storage.device for storage in storages]):
            member.free([storages[place] for place in places])

    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """All of it on all GPUs, or none and ``DeviceMemoryError``."""
        taken: list[tuple[CudaDevice, list[torch.UntypedStorage]]] = []

        def give_back() -> None:
            for member, storages in taken:
                member.give_back(storages)

        with undone_by(give_back, f"taking memory of {self.name}"):
            for member, places in self._divided([storage.device for storage, _ in pairs]):
                its = [pairs[place] for place in places]
                away = [storage for storage, nbytes in its if storage.nbytes() != nbytes]
                member.reserve(its)
                taken.append((member, away))

    def allocate(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        return self._first.allocate(sizes)

    def release_caches(self, *, workspaces: bool = True) -> None:
        for member in self._members:
            member.release_caches(workspaces=workspaces)

    @property
    def registrations(self) -> int:
        return self._first.registrations

    def register(self, arena: memoryview) -> bool:
        """Locked once, for all GPUs; each has kernels of its own to make ready."""
        locked = [member.register(arena) for member in self._members]
        return all(locked)

    def unregister(self, arena: memoryview) -> None:
        self._first.unregister(arena)

    def rng_state(self) -> torch.Tensor | None:
        return self._first.rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._first.set_rng_state(state)

    def _divided(self, devices: Sequence[torch.device]) -> Iterator[tuple[CudaDevice, list[int]]]:
        """Each GPU that has something, with its positions; the host's are the first one's."""
        numbers = {member.torch_device: number for number, member in enumerate(self._members)}
        places: list[list[int]] = [[] for _ in self._members]
        for place, device in enumerate(devices):
            places[numbers.get(device, 0)].append(place)
        for member, its_places in zip(self._members, places, strict=True):
            if its_places:
                yield member, its_places
