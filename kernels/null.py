"""A device that moves nothing: a scheduler can be tried out with it."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from gpuslice.types import DeviceName

from .device import DeviceMemory, Hold, Way
from .host.device import CpuDevice
from .transfer import Checksums, Inspector, Pairs, Transfer


class NullDevice(CpuDevice):
    """An imagined device of 80 GiB, whose storages stay on the host untouched."""

    def __init__(self, name: DeviceName) -> None:
        super().__init__(DeviceName(name.kind, None))
        self.name = name

    def pin(self) -> None:
        """Nothing computes here."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(80 << 30, 0, None, 0)

    def holds(
        self, storages: Sequence[torch.UntypedStorage], *, fixed: Set[int], exposed: Set[int] = frozenset()
    ) -> list[Hold]:
        return [Hold(Way.FREED)] * len(storages)

    def copy_out(
        self,
        pairs: Pairs,
        arena: memoryview,
        inspect: Inspector | None = None,
        checksums: Checksums | None = None,
    ) -> Transfer:
        """Nothing moves, so there is nothing to inspect."""
        return Transfer()

    copy_in = copy_out

    def reserve(self, pairs: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Those that were freed have kept it."""
        super().reserve([one for one in pairs if one[0].nbytes() != one[1]])

    def free(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """They keep their memory."""
