"""A device that moves nothing, to try out a scheduler with."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from gpuslice.types import DeviceName

from .device import DeviceMemory, Hold, Way
from .host.device import CpuDevice
from .transfer import Pairs, Transfer, Watchers


class NullDevice(CpuDevice):
    """An imagined device of 80 GiB, whose storages stay on the host untouched."""

    def __init__(self, name: DeviceName) -> None:
        super().__init__(DeviceName(name.kind, None))
        self.name = name

    def pin(self) -> None:
        """Do nothing: no work runs on this device."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(80 << 30, 0, None, 0)

    def holds(
        self, storages: Sequence[torch.UntypedStorage], *, fixed: Set[int], exposed: Set[int] = frozenset()
    ) -> list[Hold]:
        return [Hold(Way.FREED)] * len(storages)

    def _copy(self, pairs: Pairs, arena: memoryview, watchers: Watchers, *, out: bool) -> Transfer:
        """Copy nothing, and return an empty ``Transfer``."""
        return Transfer()

    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Take memory for storages that do not have their size. Freed ones have kept theirs."""
        super().reserve([one for one in pairs if one[0].nbytes() != one[1]])

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Do nothing: storages keep their memory."""
