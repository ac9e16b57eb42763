"""The job's runtime: device, RAM disk, switch and report of a process, behind suspend and resume."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import torch
from torch._C._functorch import peek_interpreter_stack

from gpuslice.checkpoint.discover import live_graphs, pending_collectives
from gpuslice.checkpoint.ramdisk.obstacle_note import write_note
from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.background_snapshot import BackgroundSnapshot
from gpuslice.checkpoint.switch.process_groups import ParkedGroups
from gpuslice.checkpoint.switch.record import SwitchRecord
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.config import Settings
from gpuslice.errors import SuspendedStateError, SuspendRefusedError, UsageError
from gpuslice.kernels import Device
from gpuslice.kernels.routes import choose
from gpuslice.kernels.vmm.shim import loaded
from gpuslice.launch.command import LAUNCH, fingerprint, rank_path
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.limits.memory_limit import MemoryLimit
from gpuslice.runtime import foreign_processes
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.checkpoints import Checkpoints, Schedule, obstacle
from gpuslice.runtime.common_snapshots import CommonSnapshots
from gpuslice.runtime.device_in_use import DeviceInUse, open_target
from gpuslice.runtime.ending import ours, say
from gpuslice.runtime.membership import Membership
from gpuslice.runtime.own_command import OwnCommand
from gpuslice.runtime.run_report import Report
from gpuslice.runtime.slot_preparation import SlotPreparation
from gpuslice.runtime.threads.main_thread import MainThread
from gpuslice.runtime.threads.thread_gate import ThreadGate
from gpuslice.training.attached import Attached
from gpuslice.training.identity import Training
from gpuslice.types import DeviceName, Route


class Runtime:
    """One process of a job: what it computes on, where its state goes, and how.

    Parameters
    ----------
    settings
        What the launcher handed down.
    identity
        Which rank this is.
    boundaries
        The process's counter.

    Attributes
    ----------
    in_use
        The device that this rank computes on.
    attached
        The job that ``gpuslice.attach`` made, if the script did.
    attachments
        How many trainings this process has attached.
    launched_job
        The name that the launcher gave the job; empty without one.
    arguments
        ``sys.argv`` when the process began.
    command
        What this process executes.
    report
        Collects the switches.
    checkpoints
        Those taken while the training goes on.
    gate
        Stops the other threads during a suspend.
    main_thread
        Suspends the job for a thread that trains.
    slot_preparation
        Prepares the store's slots, if somebody may suspend the job.
    route
        How its device is emptied.
    membership
        Which ranks of an elastic job train, if a scheduler says so.
    common_snapshots
        What the ranks of a named gang know of each other's snapshots, if each goes on from its own.

    Raises
    ------
    EnvironmentUnusableError
        If the route that the settings name cannot be taken here.
    """

    def __init__(self, settings: Settings, identity: RankIdentity, boundaries: BoundaryCounter) -> None:
        self.settings = settings
        self.identity = identity
        self.boundaries = boundaries
        self.attached: Attached | None = None
        self.attachments = 0
        self.launched_job = settings.job
        self.arguments = list(sys.argv)  # scripts change them
        self.command = OwnCommand()
        self.membership: Membership | None = None
        self.common_snapshots: CommonSnapshots | None = None
        self.gate = ThreadGate()
        self.main_thread = MainThread(lambda: self.gate)
        self.memory_limit = MemoryLimit(settings.memory, say)
        self._groups = ParkedGroups(boundaries.call_at_next, tell=say)
        self.slot_preparation: SlotPreparation | None = None
        launch = os.environ.get(LAUNCH, "")
        self.report = Report(self._report_path(), job=settings.job, rank=identity.rank, launch=launch)
        self.checkpoints = Checkpoints(self.report)
        self._unsaved_told: set[str] = set()
        self.in_use = DeviceInUse(settings, identity, self._leave_device)
        self.route = choose(Route(settings.route), self.in_use.name)

    def _report_path(self) -> Path | None:
        return rank_path(Path(self.settings.report), self.identity.rank) if self.settings.report else None

    def set_rank(self, identity: RankIdentity) -> None:
        """Be this rank, which the script has just become.

        Raises
        ------
        UsageError
            If the named job's snapshots of another rank are open already.
        """
        if identity.rank != self.identity.rank and self.settings.job and self.has_store:
            raise UsageError(
                f"rank {identity.rank} of job {self.settings.job} was suspended as rank {self.identity.rank}",
                "call torch.distributed.init_process_group before the training begins",
            )
        self.identity = identity
        self.report.set_rank(identity.rank, self._report_path())
        self.in_use.set_rank(identity)

    def next_training(self) -> Training:
        """Return the training that the script's next ``attach`` begins."""
        # Without a launcher this process is the command: it may execute one script after the other.
        command = self.settings.command or fingerprint(sys.orig_argv)
        return Training.present(self.arguments, self.attachments + 1, command)

    @property
    def boundary(self) -> int:
        """Boundaries passed; a restarted job sets its snapshot's."""
        return self.boundaries.count

    @boundary.setter
    def boundary(self, count: int) -> None:
        self.boundaries.count = count

    @property
    def device(self) -> Device:
        """The device this rank computes on, opened on first use."""
        return self.in_use.device

    @cached_property
    def ramdisk(self) -> RamDisk:
        """Where snapshots go; making it checks the directory."""
        return RamDisk.from_settings(self.settings)

    @cached_property
    def store(self) -> JobStore:
        """This rank's own directory in the RAM disk."""
        me = self.identity
        return self.ramdisk.open_store(self.settings.job or None, me.rank, ranks=me.local_ranks)

    @cached_property
    def switch(self) -> Switch:
        shim = loaded() if self.route is Route.VMM else None
        return Switch(self.device, self.store, gate=self.gate, verify=self.settings.verify, shim=shim)

    @property
    def suspended(self) -> bool:
        """Whether the job's state is away."""
        return "switch" in self.__dict__ and self.switch.suspended

    @property
    def has_store(self) -> bool:
        """Whether the store is open."""
        return "store" in self.__dict__

    def close_store(self, *, keep: bool) -> None:
        """Let go of the store, if it is open: the next use opens it anew."""
        self._leave_device()
        store = self.__dict__.pop("store", None)
        if store is not None:
            store.close(keep=keep)

    def abandon_store(self) -> None:
        """Let go of the open store, and leave all that is in it as it is."""
        self._leave_device()
        self.__dict__.pop("store").abandon()

    def _leave_device(self) -> None:
        """Another one takes its place; the switch is made anew for that, when it is needed."""
        self.__dict__.pop("switch", None)

    def _look_for_state(self) -> None:
        if not self.suspended:
            self.in_use.look_for_state()

    def interruptible(self) -> bool:
        """Whether the main thread may park here: not inside backward, a graph capture or a collective.

        Nor in a function that torch.func transforms: its tensors are wrappers without memory.
        """
        if peek_interpreter_stack() is not None:
            return False
        self._look_for_state()
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or (self.attached is not None and not self.attached.interruptible):
            return False
        try:
            self.device.check_idle()
        except SuspendRefusedError:
            return False
        return not pending_collectives.pending()

    def may_park(self) -> bool:
        """Whether it can be suspended here; if not, no other rank waits for it to be."""
        here = self.interruptible()
        if not here:
            self._groups.pass_by(self.boundary, self.device)
        return here

    def suspend(self, *, explicit: bool, script_goes_on: bool = False) -> SwitchRecord:
        """Move the job's state off its device.

        Parameters
        ----------
        explicit
            Whether the script itself asked for it here.
        script_goes_on
            Whether the script runs meanwhile. Then a tensor that it touches raises ``TensorParkedError``, in
            other threads as well, which otherwise wait.

        Raises
        ------
        SuspendRefusedError, RamDiskFullError, SwitchFailedError
            Nothing has changed.
        """
        self.checkpoints.settle()
        self._look_for_state()
        # Elsewhere a graph has given up what it had saved; the other routes take along what it has.
        amid_graphs = self.boundaries.amid_graphs and self.route is Route.TENSOR
        graph_bytes = live_graphs.held_bytes(self.device) if amid_graphs else 0
        restartable = self.attached is not None and self.attached.restartable(explicit=explicit)
        named = None if self.attached is None else self.attached.named_state()
        parking = self._groups.parking(self.boundary, self.device)
        with ours("the suspend"), self.memory_limit.lifted(), parking as release:
            pending_collectives.refuse()
            if self.common_snapshots is not None:
                self.common_snapshots.keep()
            if self.device.name.kind != "cpu":
                foreign_processes.refuse(self.ramdisk.directory)
            record = self.switch.suspend(
                boundary=self.boundary, named=named, restartable=restartable, script_goes_on=script_goes_on
            )
            self.gate.parked_access.begin()
            if restartable:
                self._tell_what_is_unsaved(self.switch.unsaved)
            release(record)
        record.leave(live_graphs.REASON, graph_bytes)
        return record

    def _tell_what_is_unsaved(self, reasons: Sequence[str]) -> None:
        """Say once of each reason why a job that is restarted will begin anew."""
        for reason in reasons:
            if reason not in self._unsaved_told:
                self._unsaved_told.add(reason)
                say(f"a restart of this job begins anew: {reason}", "suspends in this process go on working")
        if reasons and self.settings.job:
            write_note(self.store.directory, reasons[0])

    def resume(self, device: DeviceName | None = None) -> SwitchRecord:
        """Bring the state back, to ``device`` if it is given, and record the switch.

        Raises
        ------
        DeviceMemoryError, SuspendRefusedError
            The snapshot is kept and the resume may be tried again; refused, on the device that it left.
        SwitchFailedError
            The state did not come back.
        """
        with ours("the resume"):
            target = open_target(device, self.device, self.settings.cpu_slots)
            self._groups.restore(self.device, moves=target is not None)
            record = self.switch.resume(target)
            self.gate.parked_access.end()
        if target is not None:
            self.in_use.device = target
        self.memory_limit.restore(self.device.name)
        self._groups.back()
        self.report.add(record)
        self.write_report()
        if self.slot_preparation is not None:
            self.slot_preparation.resumed()
        return record

    def obstacle_to_moves(self) -> str:
        """While the job is suspended: why it cannot resume on another device, or an empty string."""
        return self._groups.obstacle_to_moves(self.device) or self.switch.obstacle_to_moves()

    @property
    def whole(self) -> bool:
        """Whether the job's state is where the script expects it: neither away nor lost."""
        return "switch" not in self.__dict__ or self.switch.whole

    @property
    def restartable_later(self) -> bool:
        """While the job is suspended: whether another process can go on, but from a later boundary only."""
        later = self.attached is not None and self.attached.restartable_later
        return later and not self.switch.restartable

    def offering(self) -> AbstractContextManager[object]:
        """Inside the block, while the job is suspended, its room in the RAM disk is there for others."""
        assert self.switch.snapshot is not None
        return self.store.offering(self.switch.snapshot)

    def keep_ready(self) -> None:
        """Somebody may suspend the job: make the arena of its next suspend ready while it trains."""
        self.slot_preparation = SlotPreparation(
            self.boundaries,
            may_suspend=lambda: not self.suspended and self.interruptible(),
            switch=lambda: self.switch,
        )

    def checkpoint(self, *, explicit: bool) -> bool:
        """Begin to save the attached job's state for a restart; whether it could be done here.

        Raises
        ------
        SuspendedStateError
            If the job is suspended.
        SuspendRefusedError, UsageError, RamDiskFullError
            If the state cannot be saved. The previous checkpoint stays.
        """
        if self.suspended:
            raise SuspendedStateError("the job is suspended", "resume it before a checkpoint")
        return self.checkpoints.begin(lambda hasty: self._save(hasty, explicit=explicit))

    def checkpoint_every(self, boundaries: int) -> None:
        """Take a checkpoint at every so many boundaries from now on."""
        Schedule(
            self.checkpoints,
            self.boundaries,
            every=boundaries,
            obstacle=lambda: obstacle(self.attached, self.settings.job),
            start=lambda hasty: self._save(hasty, explicit=self.boundaries.explicit),
            hopeless=lambda: self.attached is not None and bool(self.attached.obstacle),
        )

    def _save(self, hasty: Collection[str], *, explicit: bool) -> BackgroundSnapshot | None:
        attached = self.attached
        if attached is None or not self.interruptible() or not attached.restartable(explicit=explicit):
            return None
        _ = self.switch  # making it has the device page-lock the store's arenas
        common = self.common_snapshots
        if common is None:
            return self._snapshot(attached, hasty)
        if not common.make_room(self.boundary):
            return None
        try:
            return self._snapshot(attached, hasty)
        except BaseException:
            common.announce()  # that it is not being written
            raise

    def _snapshot(self, attached: Attached, hasty: Collection[str]) -> BackgroundSnapshot:
        """Begin it, wherever it can be begun."""
        return self.main_thread.run(lambda: self._snapshot_here(attached, hasty))

    def _snapshot_here(self, attached: Attached, hasty: Collection[str]) -> BackgroundSnapshot:
        self.gate.close()
        try:
            self.device.synchronize()
            return BackgroundSnapshot(
                self.device, self.store, attached.named_state(), boundary=self.boundary, copy_at_once=hasty
            )
        finally:
            self.gate.open()

    def write_report(self) -> None:
        """Update the report file."""
        self.report.update(boundaries=self.boundary, steps=self.boundaries.steps)

    def summary(self) -> str:
        """What happened, in one line."""
        totals = self.report.summary(boundaries=self.boundary, steps=self.boundaries.steps)
        return f"{totals}, route {self.route.value}"
