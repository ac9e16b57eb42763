"""What a suspended process must remember, and the step that makes it one: whole or not at all."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.undo import undoing
from gpuslice.kernels import Device

from .inventory import Plan
from .record import Stages, SwitchRecord


class Parked(NamedTuple):
    """What a suspended process must remember."""

    stages: Stages
    plan: Plan
    snapshot: SnapshotFile
    shared_random: dict[str, object]
    device_random: torch.Tensor | None
    since_s: float


def empty(
    plan: Plan,
    device: Device,
    snapshot: SnapshotFile,
    record: SwitchRecord,
    *,
    verify: bool,
) -> None:
    """Take the memory away and weigh what is left; if that fails half-way, bring back what is gone.

    Raises
    ------
    RollbackError
        If that fails, too: the state is lost.
    """
    try:
        plan.empty(device)
        record.weigh(plan, device)
    except BaseException as error:
        with undoing(error, "emptying the device"):
            plan.reserve(device)
            if verify:
                plan.check(snapshot)
            plan.copy_in(device, snapshot, verify=verify)
        raise
