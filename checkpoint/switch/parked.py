"""What a suspended process must remember, and the steps to that state and back: whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import NamedTuple

import torch

from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.lazy_optimizer_state import LazyResume, Stream
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.kernels import Device
from gpuslice.kernels.transfer import Transfer
from gpuslice.kernels.undo import undone_by

from .capture_plan import CapturePlan
from .duplex import arrive
from .move import move_storages
from .record import Stages, SwitchRecord
from .swap_endpoints import SuccessorEnd


class Parked(NamedTuple):
    """What a suspended process must remember."""

    stages: Stages
    plan: CapturePlan
    snapshot: SnapshotFile
    shared_random: dict[str, object]
    device_random: torch.Tensor | None
    since_s: float


def empty(
    plan: CapturePlan,
    device: Device,
    snapshot: SnapshotFile,
    record: SwitchRecord,
    *,
    verify: bool,
) -> None:
    """Take the memory away and record what is left; if that fails half-way, bring back what is gone.

    Raises
    ------
    RollbackError
        If that fails, too: the state is lost.
    """

    def undo() -> None:
        plan.reserve(device)
        plan.copying_in(device, snapshot, plan.keys, verify=verify)()

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
    lazy: LazyResume | None,
    swap: SuccessorEnd | None,
) -> Stream | None:
    """Reserve everything and copy the snapshot there; what was reserved is given back if that fails.

    With a ``swap``, that begins while the one before it is still leaving the device.

    Returns
    -------
    Stream or None
        What is still to come, if ``lazy`` lets something come later; the caller must start it.
    """
    stages, plan = parked.stages, parked.plan
    stream: Stream | None = None
    moving = (target.torch_device, target.name.further) != (home.torch_device, home.name.further)
    if swap is not None and (moving or not plan.in_parts):
        with stages.stage("handover_s"):
            swap.await_the_whole(f"a job that comes by the route {stages.record.route} comes whole")
        swap = None
    if moving:
        plan.check_movable(home)

    def bring(sids: Sequence[int]) -> Transfer:
        with stages.stage("reserve_s"):
            plan.reserve(target, sids)
        with stages.stage("copy_in_s"):
            keys, later = plan.keys, () if stream is None else stream.storages
            now = [keys[sid] for sid in sids if keys[sid] not in later]
            return plan.copying_in(target, parked.snapshot, now, verify=verify)()

    def undo() -> None:
        if stream is not None:
            stream.cancel()
        plan.empty(target)
        if swap is not None:
            swap.back()

    with closing(swap) if swap is not None else nullcontext(), undone_by(undo, "taking the state back"):
        with stages.stage("fetch_s"):
            store.bring_back(parked.snapshot)
        with stages.stage("reserve_s"):
            if moving:
                plan = plan.moved_to(target)
            elif lazy is not None and swap is None and plan.in_parts:
                stream = lazy.hold_back(plan.freed)
        if swap is None:
            stages.record.copy_in = bring(range(len(plan.storages)))
        else:
            stages.record.copy_in = arrive(target, plan.sizes, swap, stages, bring)
        process_rng.restore(parked.shared_random)
        if moving:
            if parked.device_random is not None:
                target.set_rng_state(parked.device_random)
            move_storages(parked.plan.storages, plan.storages)
    return stream
