"""The suspend/resume transaction of one rank, by the tensor route or by the vmm route.

`Switch.suspend` reads top to bottom:

1. stop the other threads of the process, and wait for the device;
2. find the live storages of the device;
3. plan the capture; what cannot be captured is refused by name;
4. take room in the RAM disk;
5. copy out, with checksums taken on the way;
6. publish the snapshot;
7. keep the states of the random number generators;
8. empty the device;
9. park: keep what the resume needs.

What fails up to step 6 changes nothing; what fails after it is undone from the snapshot. A resume is
`parked.bring_back`, and then the gate opened. If it fails, the snapshot is kept and it may be tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from gpuslice.checkpoint.discover import heap
from gpuslice.checkpoint.discover.storages import LiveStorage, sweep, sweep_any
from gpuslice.checkpoint.format.layout import Layout
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.gate import Gate, NoGate
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.state import NamedState, describe
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.ramdisk.writer import SnapshotWriter
from gpuslice.clock import Clock, MonotonicClock
from gpuslice.errors import RollbackError, SuspendedStateError, SuspendRefusedError
from gpuslice.kernels import Device
from gpuslice.kernels.host.process_memory import resident_anonymous_bytes
from gpuslice.kernels.undo import undone_by
from gpuslice.kernels.vmm.shim import Vmm
from gpuslice.types import Route

from .block_plan import plan_blocks
from .capture_plan import CapturePlan, plan_capture
from .parked import Parked, bring_back, empty
from .record import Stages, SwitchRecord


class Switch:
    """Suspends and resumes one rank; owned by the job's main thread.

    Parameters
    ----------
    device
        Where the job runs.
    store
        Where its snapshots go.
    gate
        Stops the other threads of the process.
    verify
        True if a resume compares every byte of the snapshot with its checksum.
    shim
        The memory shim of the vmm route; without it, the route is tensor.
    """

    def __init__(
        self,
        device: Device,
        store: JobStore,
        *,
        gate: Gate | None = None,
        verify: bool = True,
        clock: Clock | None = None,
        shim: Vmm | None = None,
    ) -> None:
        self.device = device
        self._shim = shim
        self._store = store
        self._gate = gate or NoGate()
        self._verify = verify
        self._clock = clock or MonotonicClock()
        self._parked: Parked | None = None
        self._lost: RollbackError | None = None
        self._arena_is_new = False
        #: Position of each storage in the last capture, by key, so that unchanged ones keep their place.
        self._order: dict[int, int] = {}
        #: Layout of the last suspend, or else an estimate of the next.
        self._layout: Layout | None = None
        #: The newest snapshot; it stays readable until the next suspend needs its place.
        self.snapshot: SnapshotFile | None = None
        #: What the newest snapshot lacks, and why. Then no other process can continue from it.
        self.unsaved: tuple[str, ...] = ()
        self._bind(device)

    @property
    def suspended(self) -> bool:
        """True if the job's state is away. Then no tensor of the device may be touched."""
        return self._parked is not None

    @property
    def restartable(self) -> bool:
        """True if another process can continue from the newest snapshot."""
        return self.snapshot is not None and self.snapshot.restartable

    @property
    def whole(self) -> bool:
        """True if the state is on the device, so that the script may run: neither away nor lost."""
        return self._parked is None and self._lost is None

    @heap.uncollected()
    def suspend(
        self,
        *,
        boundary: int,
        named: Mapping[str, object] | None = None,
        restartable: bool = False,
        script_goes_on: bool = False,
    ) -> SwitchRecord:
        """Take the state away from the device, and return the record.

        Parameters
        ----------
        boundary
            The mini-batch boundary at which the job stands.
        named
            Objects that another process can restore from the snapshot (see ``state.describe``).
        restartable
            True if ``named`` is all that another process needs.
        script_goes_on
            True if the script and its other threads run meanwhile, instead of waiting for the resume.

        Returns
        -------
        SwitchRecord
            Complete up to the suspend; `resume` returns the same one with the rest.

        Raises
        ------
        SuspendedStateError
            If it is suspended already.
        SuspendRefusedError, UsageError
            If something cannot be suspended or saved; names it. Nothing was touched.
        RamDiskFullError
            If the RAM disk has no room. The state and the newest restartable snapshot are as they were.
        RollbackError
            If emptying the device failed, and undoing that, too: the state is lost. Other threads stay
            stopped, and every later call raises the same.
        """
        self._check_not_lost()
        if self._parked is not None:
            raise SuspendedStateError("the job is suspended already", "resume it first")
        route = Route.TENSOR if self._shim is None else Route.VMM
        stages = Stages(SwitchRecord(boundary, route.value, str(self.device.name)), self._clock)
        try:
            self._quiesce(stages)
            state, plan = self._plan(stages, named or {}, script_goes_on=script_goes_on)
            writer = self._admit(stages, plan, share=self._shares)
            with writer:
                with stages.stage("copy_out_s"):
                    copied = plan.copy_out(self.device, writer)
                stages.record.copy_out, stages.record.bytes_unchanged = copied, copied.unchanged_bytes
                with stages.stage("publish_s"):
                    snapshot = writer.publish(
                        state.tree,
                        plan.tensors,
                        boundary=boundary,
                        restartable=restartable and not state.unsaved,
                    )
                    stages.record.bytes_shared = writer.shared_bytes
            self.unsaved = state.unsaved
            del state  # tensors made for the snapshot alone are freed before the device is emptied
            # After the search: otherwise these states would be found and emptied, too.
            shared, own = process_rng.capture(), self.device.rng_state()
            with stages.stage("free_s"):
                empty(plan, self.device, snapshot, stages.record, verify=self._verify)
        except RollbackError as error:
            self._lose(error)
            raise
        except BaseException:
            self._gate.open()
            raise
        self._parked = Parked(stages, plan, snapshot, shared, own, self._clock.now(), script_goes_on)
        self.snapshot = snapshot
        if script_goes_on:
            self._gate.open()
        return stages.record

    def _quiesce(self, stages: Stages) -> None:
        with stages.stage("admit_s"):
            self._arena_is_new = False
            self._store.cool()
        with stages.stage("quiesce_s"):
            self._gate.close()
            self.device.check_idle()
            self.device.synchronize()
        stages.record.rss_before_bytes = resident_anonymous_bytes()

    def _plan(
        self, stages: Stages, named: Mapping[str, object], *, script_goes_on: bool
    ) -> tuple[NamedState, CapturePlan]:
        with stages.stage("find_s"):
            alone = self._gate.alone and not script_goes_on
            found = self._find(alone=alone)  # first: otherwise tensors made by `describe` would be found, too
            state = describe(named)
            plan = self._capture(found, state.tensors, guard_all=script_goes_on)
            self._layout = plan.layout
        return state, plan

    def _find(self, *, alone: bool = True) -> list[LiveStorage]:
        """Return the storages on the device, in the order of the last time, new ones last."""
        if self._shim is not None:
            return sweep_any(self.device)
        found, new = sweep(self.device, alone=alone), len(self._order)
        found.sort(key=lambda one: (self._order.get(one.key, new), one.address))
        self._order = {one.key: number for number, one in enumerate(found)}
        return found

    def _capture(
        self,
        found: Sequence[LiveStorage],
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        guard_all: bool = False,
    ) -> CapturePlan:
        """Return the capture plan of the storages. ``SuspendRefusedError`` names what cannot be captured."""
        if self._shim is not None:
            return plan_blocks(self._shim, self.device, found, named)
        return plan_capture(self.device, found, named, guard_all=guard_all)

    @property
    def _shares(self) -> bool:
        """True if ranks keep equal pieces once. An arena that a GPU page-locks belongs to one rank."""
        return self._shim is None and self.device.torch_device.type == "cpu"

    def _admit(self, stages: Stages, plan: CapturePlan, *, share: bool) -> SnapshotWriter:
        with stages.stage("admit_s"):
            registrations = self.device.registrations
            writer = self._store.begin(plan.layout, share=share)
            stages.record.cold = self._arena_is_new
            stages.record.registrations = self.device.registrations - registrations
        return writer

    def warm_up(self) -> threading.Thread | None:
        """Prepare the arena of the next suspend in the background, for a state like the present one.

        Call it at a boundary when the state is complete (an optimizer's after its first steps). It never
        fails: the suspend does what this could not do.

        Returns
        -------
        threading.Thread or None
            The running thread; None if the arena is warm already, or there is no room.
        """
        if self._layout is None:
            try:
                with heap.uncollected():
                    self._layout = self._capture(self._find(), ()).layout
            except SuspendRefusedError:
                return None
        return self._store.warm_up(self._layout, share=self._shares)

    @heap.uncollected()
    def resume(self, device: Device | None = None) -> SwitchRecord:
        """Bring the state back, to ``device`` if it is given, and return the record.

        Raises
        ------
        SuspendedStateError
            If it is not suspended.
        DeviceMemoryError
            If the device lacks memory. The job is still suspended; try again.
        SuspendRefusedError
            If the state cannot move to that device; names the tensor. The job is still suspended.
        CorruptSnapshotError
            If the snapshot was damaged while the job was parked; names the storage.
        RollbackError
            If a step failed and undoing it, too: the state is lost, as above.
        """
        self._check_not_lost()
        if self._parked is None:
            raise SuspendedStateError("the job is not suspended", "suspend it first")
        parked, target = self._parked, device or self.device
        record, resumed_at_s = parked.stages.record, self._clock.now()
        try:
            with self._others_stopped(parked), self._at_home_on(target):
                bring_back(parked, self._store, self.device, target, verify=self._verify)
            self._parked, self.device = None, target
            record.parked_s, record.verified = resumed_at_s - parked.since_s, self._verify
            record.rss_after_bytes = resident_anonymous_bytes()
            self._gate.open()
        except RollbackError as error:
            self._lose(error)
            raise
        return record

    @contextmanager
    def _others_stopped(self, parked: Parked) -> Iterator[None]:
        """Stop the other threads if they run while the job is suspended. If the block fails, they go on."""
        if not parked.script_goes_on:
            yield
            return
        self._gate.close()
        try:
            yield
        except RollbackError:
            raise
        except BaseException:
            self._gate.open()
            raise

    def obstacle_to_moves(self) -> str:
        """Return why the suspended job cannot resume on another device, or an empty string."""
        if self._parked is None:
            raise SuspendedStateError("the job is not suspended", "suspend it first")
        if self.device.torch_device.type == "cpu":
            return ""  # the slots of the host share its memory
        try:
            self._parked.plan.check_movable(self.device)
        except SuspendRefusedError as error:
            return error.message
        return ""

    def _lose(self, error: RollbackError) -> None:
        """Record that the state is lost. No thread may touch it again."""
        self._lost = error
        self._gate.shut()

    def _check_not_lost(self) -> None:
        if self._lost is not None:
            raise RollbackError(self._lost.message, self._lost.remedy) from self._lost

    def _bind(self, device: Device) -> None:
        """Make a device page-lock the store's arenas: the present mappings and all later ones."""
        self._store.bind(partial(self._arena_mapped, device), device.unregister, device.memory_node)

    def _arena_mapped(self, device: Device, arena: memoryview) -> None:
        self._arena_is_new = True
        device.register(arena)

    @contextmanager
    def _at_home_on(self, target: Device) -> Iterator[None]:
        """Compute and page-lock on ``target`` from now on. If the block fails, return to the old device."""

        def go_back() -> None:
            self.device.pin()
            self._bind(self.device)

        if target is self.device:
            yield
            return
        with undone_by(go_back, f"moving to {target.name}"):
            target.pin()
            self._bind(target)
            yield
