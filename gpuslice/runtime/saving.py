"""Begins checkpoints of the attached job, at places from which a restart is possible."""

from __future__ import annotations

from collections.abc import Collection

from gpuslice.checkpoint.switch.background_snapshot import BackgroundSnapshot
from gpuslice.errors import SuspendedStateError
from gpuslice.runtime.checkpoints import Checkpoints, Schedule, obstacle
from gpuslice.runtime.process import Process
from gpuslice.runtime.stopping import Obstacle
from gpuslice.runtime.suspension import Suspension
from gpuslice.training.attached import Attached


class Saving:
    """The part of a process's runtime that saves the attached job while it trains.

    Parameters
    ----------
    process
        The process, with its attached job.
    suspension
        Knows the device, and where the job can stop.
    checkpoints
        Finishes the checkpoints that are begun here.
    """

    def __init__(self, process: Process, suspension: Suspension, checkpoints: Checkpoints) -> None:
        self._process = process
        self._suspension = suspension
        self._checkpoints = checkpoints

    def take(self, *, explicit: bool) -> bool:
        """Begin a checkpoint of the attached job. Return False if none can be taken here.

        Raises
        ------
        SuspendedStateError
            If the job is suspended.
        SuspendRefusedError, UsageError, RamDiskFullError
            If the state cannot be saved. The previous checkpoint stays.
        """
        if self._suspension.away:
            raise SuspendedStateError("the job is suspended", "resume it before a checkpoint")
        return self._checkpoints.begin(lambda hasty: self._save(hasty, explicit=explicit))

    def every(self, boundaries: int) -> None:
        """Take a checkpoint after every ``boundaries`` boundaries from now on."""
        process = self._process
        Schedule(
            self._checkpoints,
            process.boundaries,
            every=boundaries,
            obstacle=lambda: obstacle(process.attached, process.settings.job),
            start=lambda hasty: self._save(hasty, explicit=process.boundaries.explicit),
            hopeless=lambda: process.attached is not None and bool(process.attached.obstacle),
        )

    def _save(self, hasty: Collection[str], *, explicit: bool) -> BackgroundSnapshot | None:
        self._process.checkpointing = True
        try:
            return self._save_if_possible(hasty, explicit=explicit)
        finally:
            self._process.checkpointing = False

    def _save_if_possible(self, hasty: Collection[str], *, explicit: bool) -> BackgroundSnapshot | None:
        process, suspension = self._process, self._suspension
        attached, common = process.attached, process.common_snapshots
        if attached is None or suspension.obstacle() is not Obstacle.NONE:
            return None
        if not attached.restartable(explicit=explicit):
            return None
        _ = suspension.switch  # making it has the device page-lock the store's arenas
        if common is None:
            return self._begin(attached, hasty)
        if not common.make_room(process.boundaries.count):
            return None
        try:
            return self._begin(attached, hasty)
        except BaseException:
            common.announce()  # that it is not being written
            raise

    def _begin(self, attached: Attached, hasty: Collection[str]) -> BackgroundSnapshot:
        """Begin a snapshot in the main thread, and return it."""
        return self._suspension.main_thread.run(lambda: self._begin_here(attached, hasty))

    def _begin_here(self, attached: Attached, hasty: Collection[str]) -> BackgroundSnapshot:
        suspension, boundary = self._suspension, self._process.boundaries.count
        suspension.gate.close()
        try:
            device, store = suspension.in_use.device, suspension.storage.store
            device.synchronize()
            state = attached.named_state()
            return BackgroundSnapshot(device, store, state, boundary=boundary, copy_at_once=hasty)
        finally:
            suspension.gate.open()
