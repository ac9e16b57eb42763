"""A device that moves nothing and takes the time a cost model says: for tests of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from gpuslice.errors import DeviceMemoryError, EnvironmentUnusableError
from gpuslice.types import DeviceName

from .device import DeviceMemory, Hold, Way
from .transfer import Inspector, Marks, Pairs, Transfer


@dataclass(frozen=True, slots=True)
class NullCost:
    """What moving would cost: a fixed time per call, and bytes per second in each direction."""

    fixed_s: float = 0.0
    out_bytes_per_s: float = 50e9
    in_bytes_per_s: float = 50e9

    def out_s(self, nbytes: int) -> float:
        return self.fixed_s + nbytes / self.out_bytes_per_s

    def in_s(self, nbytes: int) -> float:
        return self.fixed_s + nbytes / self.in_bytes_per_s


def _no_wait(seconds: float) -> None:
    """Spend no time at all."""


class NullDevice:
    """Storages stay on the host untouched; only the bookkeeping of a device is done.

    Parameters
    ----------
    total_bytes
        Capacity of the imagined device: ``reserve`` beyond it raises ``DeviceMemoryError``.
    cost
        How long copies take.
    wait
        Called with the seconds that a copy takes; a virtual clock's ``advance``, or ``time.sleep``.
    """

    def __init__(
        self,
        name: DeviceName,
        *,
        total_bytes: int = 80 << 30,
        cost: NullCost | None = None,
        wait: Callable[[float], None] = _no_wait,
    ) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self.obstacles: Mapping[type, str] = {}
        self.memory_node: int | None = None
        self._total_bytes = total_bytes
        self._cost = cost or NullCost()
        self._wait = wait
        self._away: dict[int, int] = {}
        self._used_bytes = 0

    @property
    def duplex(self) -> bool:
        """No: nothing moves."""
        return False

    def pin(self) -> None:
        """Nothing computes here."""

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def check_idle(self) -> None:
        """Nothing is ever in the way."""

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "cpu"

    def held(self, gone_bytes: int) -> dict[str, int]:
        return {}

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._total_bytes, self._used_bytes, None, self._used_bytes)

    def holds(self, storages: Sequence[torch.UntypedStorage], *, fixed: Set[int], alone: bool) -> list[Hold]:
        return [Hold(Way.FREED)] * len(storages)

    def regions(self, storages: Sequence[torch.UntypedStorage]) -> list[int]:
        return [storage.data_ptr() for storage in storages]

    def copy_out(
        self, pairs: Pairs, arena: memoryview, inspect: Inspector | None = None, marks: Marks | None = None
    ) -> Transfer:
        """Nothing moves, so there is nothing to inspect."""
        self._wait(self._cost.out_s(sum(storage.nbytes() for storage, _ in pairs)))
        return Transfer()

    def copy_in(self, pairs: Pairs, arena: memoryview, inspect: Inspector | None = None) -> Transfer:
        """Nothing moves, so there is nothing to inspect."""
        self._wait(self._cost.in_s(sum(storage.nbytes() for storage, _ in pairs)))
        return Transfer()

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        leaving = {s._cdata: s.nbytes() for s in storages if s._cdata not in self._away}
        self._away |= leaving
        self._used_bytes = max(0, self._used_bytes - sum(leaving.values()))

    def discard(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.free(storages)

    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        self._admit(sum(nbytes for storage, nbytes in pairs if storage._cdata in self._away))
        for storage, _ in pairs:
            self._away.pop(storage._cdata, None)

    def allocate(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        self._admit(sum(sizes))
        return [torch.UntypedStorage(nbytes, device=self.torch_device) for nbytes in sizes]  # type: ignore[no-untyped-call]

    def release_caches(self, *, workspaces: bool = True) -> None:
        """Nothing is cached."""

    @property
    def registrations(self) -> int:
        return 0

    def register(self, arena: memoryview) -> bool:
        return True

    def unregister(self, arena: memoryview) -> None:
        """Nothing was registered."""

    def rng_state(self) -> torch.Tensor | None:
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        raise EnvironmentUnusableError(f"{self.name} has no generator")

    def _admit(self, nbytes: int) -> None:
        if self._used_bytes + nbytes > self._total_bytes:
            raise DeviceMemoryError(
                f"{self.name} has {self._total_bytes - self._used_bytes} bytes left, {nbytes} are needed",
                "suspend something else first",
            )
        self._used_bytes += nbytes
