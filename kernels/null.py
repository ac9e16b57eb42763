"""A device that moves nothing: a scheduler can be tried out with it."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from gpuslice.errors import DeviceMemoryError
from gpuslice.types import DeviceName

from .device import DeviceMemory, Hold, Way
from .host.device import CpuDevice
from .transfer import Inspector, Marks, Pairs, Transfer


class NullDevice(CpuDevice):
    """Storages stay on the host untouched; only the bookkeeping of a device is done.

    Parameters
    ----------
    total_bytes
        Capacity of the imagined device: ``reserve`` beyond it raises ``DeviceMemoryError``.
    """

    def __init__(self, name: DeviceName, *, total_bytes: int = 80 << 30) -> None:
        super().__init__(DeviceName(name.kind, None))
        self.name = name
        self._total_bytes = total_bytes
        self._away: dict[int, int] = {}
        self._used_bytes = 0

    def pin(self) -> None:
        """Nothing computes here."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._total_bytes, self._used_bytes, None, self._used_bytes)

    def holds(self, storages: Sequence[torch.UntypedStorage], *, fixed: Set[int], alone: bool) -> list[Hold]:
        return [Hold(Way.FREED)] * len(storages)

    def copy_out(
        self, pairs: Pairs, arena: memoryview, inspect: Inspector | None = None, marks: Marks | None = None
    ) -> Transfer:
        """Nothing moves, so there is nothing to inspect."""
        return Transfer()

    def copy_in(self, pairs: Pairs, arena: memoryview, inspect: Inspector | None = None) -> Transfer:
        """Nothing moves, so there is nothing to inspect."""
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

    def _admit(self, nbytes: int) -> None:
        if self._used_bytes + nbytes > self._total_bytes:
            raise DeviceMemoryError(
                f"{self.name} has {self._total_bytes - self._used_bytes} bytes left, {nbytes} are needed",
                "suspend something else first",
            )
        self._used_bytes += nbytes
