"""Taking stock: what there is on the device, and what of it a suspend takes along."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch

from gpuslice.kernels import Device

from .blocks import BlockCargo, Shim, block_layout, load_blocks
from .cargo import Cargo, load
from .columns import Storages
from .discover import check_alone, sweep
from .gate import Gate
from .layout import Layout


class Stock:
    """Remembers in which order the state of a process lay, so that what has not changed lies where it lay.

    Parameters
    ----------
    gate
        Knows whether other threads could look.
    shim
        The memory shim of the vmm route; without it, the route is tensor.
    """

    def __init__(self, gate: Gate, shim: Shim | None) -> None:
        self._gate = gate
        self._shim = shim
        self._order: dict[int, int] = {}
        #: What was found the last time, as it was found, and the positions there of those in the order.
        self._keys: list[int] = []
        self._turns: list[int] = []

    def find(self, device: Device) -> Storages:
        """What is on the device, in the order of the last time, what is new behind; none by the vmm route."""
        if self._shim is None:
            return self._in_order(sweep(device))
        check_alone(device)
        return Storages()

    def load(
        self, device: Device, found: Storages, named: Sequence[tuple[str, torch.Tensor]]
    ) -> Cargo | BlockCargo:
        """Decide what is taken along; ``SuspendRefusedError`` names what cannot be."""
        if self._shim is not None:
            return load_blocks(self._shim, device, named)
        return load(device, found, named, alone=self._gate.alone)

    def estimate(self, device: Device) -> Layout:
        """The layout of a suspend here and now, but for named state that is elsewhere."""
        if self._shim is not None:
            return block_layout(self._shim.blocks(device.torch_device.index or 0), device)
        return load(device, sweep(device), (), alone=self._gate.alone).layout

    def _in_order(self, found: Storages) -> Storages:
        """In the order of the last time; what is new behind, by address."""
        if found.keys != self._keys:
            place = list(map(self._order.get, found.keys, repeat(len(self._order))))
            by_address = sorted(range(len(found)), key=found.addresses.__getitem__)
            self._turns = sorted(by_address, key=place.__getitem__)
            self._keys = found.keys
            self._order = {found.keys[turn]: number for number, turn in enumerate(self._turns)}
        return found.in_turns(self._turns)
