"""Taking stock: what there is on the device, and what of it a suspend takes along."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpuslice.checkpoint.discover.storages import LiveStorage, check_alone, sweep
from gpuslice.checkpoint.format.layout import Layout
from gpuslice.checkpoint.gate import Gate
from gpuslice.kernels import Device
from gpuslice.kernels.vmm.shim import Vmm

from .block_plan import block_layout, plan_blocks
from .capture_plan import CapturePlan, plan_capture


class Inventory:
    """Remembers in which order the state of a process lay, so that what has not changed lies where it lay.

    Parameters
    ----------
    gate
        Knows whether other threads could look.
    shim
        The memory shim of the vmm route; without it, the route is tensor.
    """

    def __init__(self, gate: Gate, shim: Vmm | None) -> None:
        self._gate = gate
        self._shim = shim
        self._order: dict[int, int] = {}

    def find(self, device: Device) -> list[LiveStorage]:
        """What is on the device, in the order of the last time, what is new behind; none by the vmm route."""
        if self._shim is None:
            return self._in_order(sweep(device))
        check_alone(device)
        return []

    def plan(
        self, device: Device, found: Sequence[LiveStorage], named: Sequence[tuple[str, torch.Tensor]]
    ) -> CapturePlan:
        """Decide what is taken along; ``SuspendRefusedError`` names what cannot be."""
        if self._shim is not None:
            return plan_blocks(self._shim, device, named)
        return plan_capture(device, found, named, alone=self._gate.alone)

    def estimate(self, device: Device) -> Layout:
        """The layout of a suspend here and now, but for named state that is elsewhere."""
        if self._shim is not None:
            return block_layout(self._shim, device)
        return plan_capture(device, sweep(device), (), alone=self._gate.alone).layout

    def _in_order(self, found: list[LiveStorage]) -> list[LiveStorage]:
        """In the order of the last time; what is new behind, by address."""
        new = len(self._order)
        found.sort(key=lambda one: (self._order.get(one.key, new), one.address))
        self._order = {one.key: number for number, one in enumerate(found)}
        return found
