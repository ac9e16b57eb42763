"""What a suspended process must remember, and the step that makes it one: whole or not at all."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.undo import undoing
from gpuslice.kernels import Device

from .block_plan import BlockCargo
from .capture_plan import Cargo
from .record import Stages, SwitchRecord


class Parked(NamedTuple):
    """What a suspended process must remember."""

    stages: Stages
    cargo: Cargo | BlockCargo
    snapshot: SnapshotFile
    shared_random: dict[str, object]
    device_random: torch.Tensor | None
    since_s: float


def empty(
    cargo: Cargo | BlockCargo, device: Device, snapshot: SnapshotFile, record: SwitchRecord, *, verify: bool
) -> None:
    """Take the memory away and weigh what is left; if that fails half-way, bring back what is gone.

    Raises
    ------
    RollbackError
        If that fails, too: the state is lost.
    """
    try:
        cargo.empty(device)
        record.weigh(cargo, device)
    except BaseException as error:
        with undoing(error, "emptying the device"):
            cargo.reserve(device)
            if verify:
                cargo.check(snapshot)
            cargo.copy_in(device, snapshot, verify=verify)
        raise
