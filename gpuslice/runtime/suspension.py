"""Suspends and resumes the job of one process, and knows where its state is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum

from gpuslice.checkpoint.discover import live_graphs, pending_collectives
from gpuslice.checkpoint.ramdisk.obstacle_note import write_note
from gpuslice.checkpoint.switch.process_groups import ParkedGroups
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import GpusliceError
from gpuslice.kernels.routes import choose
from gpuslice.kernels.vmm.shim import loaded
from gpuslice.limits.memory_limit import MemoryLimit
from gpuslice.runtime import foreign_processes
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.checkpoints import Checkpoints
from gpuslice.runtime.device_in_use import DeviceInUse, open_target
from gpuslice.runtime.ending import ours, say
from gpuslice.runtime.process import Process, Storage
from gpuslice.runtime.stopping import Act, Obstacle, Wish, decide, find_obstacle, is_transformed
from gpuslice.runtime.threads.main_thread import MainThread
from gpuslice.runtime.threads.thread_gate import ThreadGate
from gpuslice.types import DeviceName, Route


class Phase(Enum):
    """Where the job's state is: on its device, away, or lost."""

    HERE = "on the device, as the script expects it"
    AWAY = "in the RAM disk"
    LOST = "nowhere: neither the suspend nor its undoing has worked"


class SlotPreparation:
    """A boundary callback that prepares the arena of the next suspend in the background.

    It does so from the second optimizer step on, when the job's state is complete.

    Parameters
    ----------
    boundaries
        The process's counter, which calls it.
    may_suspend
        Returns True if the job could be suspended right here.
    switch
        Returns the switch that prepares the arena, made when it is first needed.

    Attributes
    ----------
    warming
        The thread that prepared the last arena; None if there is none.
    """

    def __init__(
        self,
        boundaries: BoundaryCounter,
        *,
        may_suspend: Callable[[], bool],
        switch: Callable[[], Switch],
    ) -> None:
        self.warming: threading.Thread | None = None
        self._boundaries = boundaries
        self._may_suspend = may_suspend
        self._switch = switch
        boundaries.call_at(1, self._at_boundary)

    def resumed(self) -> None:
        """Prepare the arena of the next suspend, after a resume. A restartable snapshot keeps its slot."""
        self.warming = self._switch().warm_up()

    def _at_boundary(self, boundary: int) -> None:
        counter = self._boundaries
        # Adam's state comes with the first step; where there is none, gradients with the first pass.
        complete = counter.steps >= 2 or (counter.amid_graphs and boundary > 1)
        if not complete or not self._may_suspend():
            counter.call_at_next(self._at_boundary)
        elif self.warming is None:
            with suppress(GpusliceError):  # whatever is in the way, the suspend will say so
                self.warming = self._switch().warm_up()


class Suspension:
    """The part of a process's runtime that suspends and resumes its job.

    Parameters
    ----------
    process
        The process, with its attached job.
    checkpoints
        The checkpoints, which are finished before a suspend.

    Attributes
    ----------
    in_use
        The device that this rank computes on.
    storage
        The store that snapshots go to.
    gate
        Stops the other threads during a suspend.
    main_thread
        Suspends the job for another thread that trains.
    memory_limit
        The job's memory limit on its device.
    slot_preparation
        Prepares the arena of the next suspend; None if the job is not going to be suspended.
    route
        The way in which the device is emptied.

    Raises
    ------
    EnvironmentUnusableError
        If the route that the settings name cannot be taken here.
    """

    def __init__(self, process: Process, checkpoints: Checkpoints) -> None:
        self._process = process
        self._checkpoints = checkpoints
        self.gate = ThreadGate()
        self.main_thread = MainThread(lambda: self.gate)
        self.memory_limit = MemoryLimit(process.settings.memory, say)
        self.slot_preparation: SlotPreparation | None = None
        self._groups = ParkedGroups(process.boundaries.call_at_next, tell=say)
        self._switch: Switch | None = None
        self._unsaved_told: set[str] = set()
        self.storage = Storage(process, self._leave)
        self.in_use = DeviceInUse(process.settings, process.identity, self._leave)
        self.route = choose(Route(process.settings.route), self.in_use.name)

    def _leave(self) -> None:
        """Drop the switch, because another device or store takes the place of the present one."""
        self._switch = None

    @property
    def phase(self) -> Phase:
        """The place where the job's state is."""
        if self._switch is None or self._switch.whole:
            return Phase.HERE
        return Phase.AWAY if self._switch.suspended else Phase.LOST

    @property
    def away(self) -> bool:
        """Return True if the job is suspended."""
        return self.phase is Phase.AWAY

    @property
    def whole(self) -> bool:
        """Return True if the script may go on: the state is neither away nor lost."""
        return self.phase is Phase.HERE

    @property
    def switch(self) -> Switch:
        """The switch of the present device and store, made on first use."""
        if self._switch is None:
            shim = loaded() if self.route is Route.VMM else None
            device, store, verify = self.in_use.device, self.storage.store, self._process.settings.verify
            self._switch = Switch(device, store, gate=self.gate, verify=verify, shim=shim)
        return self._switch

    def obstacle(self) -> Obstacle:
        """Return what keeps the job from being suspended where the script is."""
        if is_transformed():
            return Obstacle.TRANSFORM
        self._look_for_state()
        return find_obstacle(self.in_use.device, self._process.attached)

    def _look_for_state(self) -> None:
        if not self.away:
            self.in_use.look_for_state()

    def at_boundary(self, wish: Wish) -> Act:
        """Return what is done at the present boundary.

        If the rank passes the boundary by, the other ranks are told, so that none waits for this rank.
        """
        if wish is Wish.NOTHING:
            return Act.RUN_ON
        obstacle = self.obstacle()
        in_handler = wish is Wish.PARK_AGAIN and not self.main_thread.stays
        act = decide(wish, obstacle, in_handler=in_handler)
        if act is Act.PASS_BY:
            self._groups.pass_by(self._process.boundaries.count, self.in_use.device)
        return act

    def suspend(self, *, explicit: bool, script_goes_on: bool = False) -> SwitchRecord:
        """Move the job's state off its device, and return the record of the suspend.

        Parameters
        ----------
        explicit
            True if the script itself asked for it here.
        script_goes_on
            True if the script runs meanwhile. A tensor that it touches then raises ``TensorParkedError``.
            This includes other threads, which otherwise wait.

        Raises
        ------
        SuspendRefusedError, RamDiskFullError, SwitchFailedError
            Nothing has changed.
        """
        self._checkpoints.settle()
        process, device = self._process, self.in_use
        self._look_for_state()
        attached, boundary = process.attached, process.boundaries.count
        # Elsewhere a graph has given up what it had saved; the other routes take along what it has.
        amid_graphs = process.boundaries.amid_graphs and self.route is Route.TENSOR
        graph_bytes = live_graphs.held_bytes(device.device) if amid_graphs else 0
        restartable = attached is not None and attached.restartable(explicit=explicit)
        named = None if attached is None else attached.named_state()
        parking = self._groups.parking(boundary, device.device)
        with ours("the suspend"), self.memory_limit.lifted(), parking as release:
            pending_collectives.refuse()
            if process.common_snapshots is not None:
                process.common_snapshots.keep()
            if device.name.kind != "cpu":
                foreign_processes.refuse(self.storage.ramdisk.directory)
            record = self.switch.suspend(
                boundary=boundary, named=named, restartable=restartable, script_goes_on=script_goes_on
            )
            self.gate.parked_access.begin()
            if restartable:
                self._tell_what_is_unsaved(self.switch.unsaved)
            release(record)
        record.leave(live_graphs.REASON, graph_bytes)
        return record

    def _tell_what_is_unsaved(self, reasons: Sequence[str]) -> None:
        """Print each reason, once, why a restart of this job will begin anew, and note the first one."""
        for reason in reasons:
            if reason not in self._unsaved_told:
                self._unsaved_told.add(reason)
                say(f"a restart of this job begins anew: {reason}", "suspends in this process go on working")
        if reasons and self._process.settings.job:
            write_note(self.storage.store.directory, reasons[0])

    def resume(self, device: DeviceName | None = None) -> SwitchRecord:
        """Bring the state back, to ``device`` if it is given. Report the switch and return its record.

        Raises
        ------
        DeviceMemoryError, SuspendRefusedError
            The snapshot is kept and the resume may be tried again. If it was refused, only on the device that
            the state left.
        SwitchFailedError
            The state did not come back.
        """
        with ours("the resume"):
            target = open_target(device, self.in_use.device, self._process.settings.cpu_slots)
            self._groups.restore(self.in_use.device, moves=target is not None)
            record = self.switch.resume(target)
            self.gate.parked_access.end()
        if target is not None:
            self.in_use.device = target
        self.memory_limit.restore(self.in_use.name)
        self._groups.back()
        self._process.report.add(record)
        self._process.write_report()
        if self.slot_preparation is not None:
            self.slot_preparation.resumed()
        return record

    def obstacle_to_moves(self) -> str:
        """Return why the suspended job cannot resume on another device; an empty string if it can."""
        return self._groups.obstacle_to_moves(self.in_use.device) or self.switch.obstacle_to_moves()

    @property
    def restartable_later(self) -> bool:
        """Return True if another process can go on from a later boundary only. For a suspended job."""
        attached = self._process.attached
        return attached is not None and attached.restartable_later and not self.switch.restartable

    def offering(self) -> AbstractContextManager[object]:
        """Let other processes have the suspended job's room in the RAM disk inside the block."""
        assert self.switch.snapshot is not None
        return self.storage.store.offering(self.switch.snapshot)

    def keep_ready(self) -> None:
        """Prepare the arena of the next suspend while the job trains, because it may be suspended."""
        self.slot_preparation = SlotPreparation(
            self._process.boundaries,
            may_suspend=lambda: not self.away and self.obstacle() is Obstacle.NONE,
            switch=lambda: self.switch,
        )
