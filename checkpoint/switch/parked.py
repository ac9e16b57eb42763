"""The state of a suspended process, and the steps to it and back: each completely or not at all."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.kernels import Device
from gpuslice.kernels.undo import undone_by

from .capture_plan import CapturePlan
from .move import move_storages
from .record import Stages, SwitchRecord


class Parked(NamedTuple):
    """What a suspended process must remember to resume."""

    stages: Stages
    plan: CapturePlan
    snapshot: SnapshotFile
    shared_random: dict[str, object]
    device_random: torch.Tensor | None
    since_s: float
    script_goes_on: bool


def empty(
    plan: CapturePlan,
    device: Device,
    snapshot: SnapshotFile,
    record: SwitchRecord,
    *,
    verify: bool,
) -> None:
    """Empty the device and record what is left. If that fails half-way, restore what was emptied.

    Raises
    ------
    RollbackError
        If that fails, too: the state is lost.
    """

    def undo() -> None:
        plan.reserve(device)
        plan.copy_in(device, snapshot, verify=verify)

    with undone_by(undo, "emptying the device"):
        plan.empty(device)
        record.record_memory(plan, device)


def bring_back(
    parked: Parked,
    store: JobStore,
    home: Device,
    target: Device,
    *,
    verify: bool,
) -> None:
    """Take memory for everything and copy the snapshot there. If that fails, release the memory."""
    stages, plan = parked.stages, parked.plan
    moving = (target.torch_device, target.name.further) != (home.torch_device, home.name.further)
    if moving:
        plan.check_movable(home)

    def undo() -> None:
        plan.empty(target)

    with undone_by(undo, "taking the state back"):
        with stages.stage("fetch_s"):
            store.bring_back(parked.snapshot)
        with stages.stage("reserve_s"):
            if moving:
                plan = plan.moved_to(target)
            plan.reserve(target)
        with stages.stage("copy_in_s"):
            stages.record.copy_in = plan.copy_in(target, parked.snapshot, verify=verify)
        process_rng.restore(parked.shared_random)
        if moving:
            if parked.device_random is not None:
                target.set_rng_state(parked.device_random)
            move_storages(parked.plan.storages, plan.storages)
