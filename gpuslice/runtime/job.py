"""``attach``, ``Job``, ``restore``: gpuslice in a training script (docs/training-scripts.md)."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpuslice import config
from gpuslice.checkpoint.attributes.job_attributes import ATTRIBUTES, JobAttributes
from gpuslice.checkpoint.attributes.known import KnownAttributes
from gpuslice.checkpoint.format.reader import SnapshotFile, open_snapshot
from gpuslice.checkpoint.named import process_rng
from gpuslice.checkpoint.named.describe import is_holder
from gpuslice.checkpoint.named.param_groups import skip_groups_that_are_there
from gpuslice.checkpoint.named.state import OWN_PREFIX, Restoration, check, describe
from gpuslice.errors import (
    AddressSpaceError,
    DeviceMemoryError,
    SuspendRefusedError,
    UsageError,
)
from gpuslice.runtime import trainings
from gpuslice.runtime.current import runtime
from gpuslice.runtime.ending import undisturbed, whole_or_ended
from gpuslice.runtime.progress import Progress, goal
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.stopping import is_transformed
from gpuslice.training import identity
from gpuslice.training.snapshot import Snapshot
from gpuslice.training.state import State, saved_names
from gpuslice.types import DeviceName

Batch = TypeVar("Batch")

#: A resume that raises one of these has changed nothing, and the script may try again.
_MAY_BE_TRIED_AGAIN = (AddressSpaceError, DeviceMemoryError, SuspendRefusedError, UsageError)
_RNG = f"{OWN_PREFIX}rng"
_PROGRESS = f"{OWN_PREFIX}progress"


class Job:
    """The state of a training script under names, made by `attach`.

    Attributes
    ----------
    state
        The attached numbers, texts, lists and dicts, and whatever else the script puts there; after a
        restart, as they were saved.
    """

    #: False, because every rank goes on from its own snapshot.
    replicated = False
    samples = 0
    interruptible = True

    def __init__(self, process: Runtime, named: Mapping[str, object]) -> None:
        self._runtime = process
        self._suspension = process.suspension
        self._objects = {name: item for name, item in named.items() if _lives_on(item)}
        own = {name: item for name, item in named.items() if not _lives_on(item)}
        self.state = State(own, self._objects)
        self._attributes = JobAttributes(self._attached)
        self._progress = Progress(
            process.boundaries,
            self._attributes.knows,
            self._attributes,
            lambda: trainings.finish(process),
        )
        self._training = process.next_training()
        #: Why the job is attached no more; empty while it is attached.
        self._ended = ""

    def _attached(self) -> dict[str, object]:
        return {**self._objects, **self.state.data}

    def suspend(self) -> Snapshot:
        """Move the job's state to the RAM disk and free its device memory.

        Until `resume`, touching a tensor of the job raises ``TensorParkedError``, in every thread. Call this
        last in the body of a `batches` loop, or behind it: a process that restarts from the snapshot goes on
        with the next batch, or with the next epoch. An epoch without such a loop begins anew.

        Raises
        ------
        SuspendedStateError
            If the job is suspended.
        SuspendRefusedError, RamDiskFullError, UsageError
            If the state cannot be saved, or in another thread than the main one; nothing has changed.
        RollbackError
            If the device could neither be emptied nor be filled again: the state is lost, end the process.
        """
        self._check_place("job.suspend")
        record, away = None, not self._suspension.whole
        try:
            with undisturbed(), whole_or_ended(lambda: away or self._suspension.whole):
                self._runtime.storage.store.whole_files = True  # the script gets its path
                record = self._suspension.suspend(explicit=True, script_goes_on=True)
        except BaseException:
            if record is not None:  # a signal's handler raised: the script unwinds with its state
                with undisturbed(), whole_or_ended(lambda: self._suspension.whole):
                    self._suspension.resume()
            raise
        snapshot = self._suspension.switch.snapshot
        assert snapshot is not None
        self._runtime.storage.store.handed_out = True
        return Snapshot(
            path=snapshot.path,
            nbytes=snapshot.nbytes,
            seconds=record.suspend_s,
            gb_per_s=record.gb_per_s_out,
            boundary=snapshot.boundary,
            restartable=snapshot.restartable,
        )

    def checkpoint(self) -> bool:
        """Save the job's state for a restart, in the background while the training goes on.

        Parameters and optimizer state are copied during the next forward and backward pass; the optimizer's
        step waits for that, and everything else is copied at once. The checkpoint counts when all of it is
        in the RAM disk: a process killed before goes on from the one before. Call this last in a loop's body.

        Returns
        -------
        bool
            True if a checkpoint was begun. None is begun for a job without a name, on the way back to where
            a restarted job was, in a ``job.batches`` loop within another, after a ``job.epochs`` loop that
            has ended, and by a rank that is ahead of another one's checkpoint, or cannot learn what the
            others have.

        Raises
        ------
        SuspendedStateError
            If the job is suspended.
        SuspendRefusedError, RamDiskFullError, UsageError
            If the state cannot be saved, or in another thread than the main one; the previous one stays.
        """
        self._check_place("job.checkpoint")
        if not self._runtime.settings.job:
            warnings.warn(
                'job.checkpoint() does nothing for a job without a name: gpuslice.attach("NAME", ...)',
                stacklevel=2,
            )
            return False
        return self._runtime.saving.take(explicit=True)

    def resume(self, device: str | None = None) -> None:
        """Bring the state back, to another device if one is named.

        Raises
        ------
        SuspendedStateError
            If the job is not suspended.
        DeviceMemoryError
            If the device lacks memory; the snapshot is kept, and this may be called again.
        SuspendRefusedError
            If the state cannot move to that device; it may be called for the one that it left.

        Any other failure ends the process at once, with the error's exit code and the snapshot kept: the
        script must not go on, nor save anything, without its state.
        """
        self._check_place("job.resume")
        target = None if device is None else DeviceName.parse(device)
        retry = False
        with undisturbed(), whole_or_ended(lambda: self._suspension.whole or retry):
            try:
                self._suspension.resume(target)
            except _MAY_BE_TRIED_AGAIN:
                retry = True
                raise

    @contextmanager
    def suspended(self) -> Iterator[Snapshot]:
        """Suspend the job for the duration of the block, and resume it afterwards."""
        snapshot = self.suspend()
        try:
            yield snapshot
        finally:
            if self._suspension.away:
                self.resume()

    def detach(self) -> None:
        """End the attachment: the script may attach another training, or go on without one.

        A suspended job is resumed first. Its loops raise an error when they go on, and its snapshots are
        removed as at the end of a script. Nothing happens if the job is attached no more.
        """
        if not self._ended:
            self._check_place("job.detach")
            trainings.end(self._runtime, "job.detach() was called")

    def end(self, cause: str) -> None:
        """Have the job's loops and calls raise an error that names the cause."""
        self._ended = cause
        self._progress.end(cause)

    def epochs(self, count: int) -> Iterator[int]:
        """Return the numbers of ``range(count)``, in a restarted process from the epoch that was going on.

        When the loop has ended by itself, the training is finished: its snapshots are removed, and no others
        are taken for a restart until another loop over epochs begins.
        """
        return self._progress.epochs(count)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of ``loader``. A restarted process goes on after the last batch that was done.

        Raises
        ------
        UsageError
            If the loader has a random number generator of its own that is not attached.
        """
        return self._progress.batches(loader)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Load a snapshot of this script and go on from there. The loops that follow skip what was done.

        Raises
        ------
        SnapshotError
            If the file is damaged or does not fit; nothing has changed.
        """
        self._check_place("job.restore")
        self._go_on_from(open_snapshot(Path(path)))

    def _check_place(self, call: str) -> None:
        if self._ended:
            raise UsageError(
                f"{call}() is called on a job that was detached: {self._ended}",
                "use the job that was attached last",
            )
        _check_place(call)

    def _go_on_from(self, snapshot: SnapshotFile, differs: Callable[[str], None] | None = None) -> None:
        """Load ``snapshot``, and close it when the loops have reached the place where it was taken.

        ``differs`` is called with the reason if a loop cannot get there.
        """
        restoration = self._check(snapshot, verify=self._runtime.settings.verify)
        process_rng.check(restoration.value(_RNG), restoration.gpus)
        target = goal(restoration.value(_PROGRESS), restoration.gpus)

        def load(restoration: Restoration) -> None:
            self._attributes.revert()
            loaded = restoration.apply()
            self.state.data = {name: loaded[name] for name in saved_names(snapshot)}
            process_rng.restore(loaded[_RNG], restoration.gpus)
            self._runtime.boundaries.count = self._runtime.boundaries.went_on_from = snapshot.boundary
            self._progress.count_from(target)

        def reached() -> None:
            end_skipping()
            # What the script took out of ``state`` meanwhile, into variables of its own, is refilled.
            load(self._check(snapshot, verify=False))
            self._attributes.reached()
            snapshot.close()

        load(restoration)
        end_skipping = skip_groups_that_are_there(self._attributes.optimizers)
        self._attributes.head_for(partial(check, snapshot, verify=self._runtime.settings.verify))
        self._progress.head_for(target, reached, restoration.gpus, differs)

    def _check(self, snapshot: SnapshotFile, *, verify: bool) -> Restoration:
        """Compare a snapshot with the job's present objects, and return the restoration that loads it."""
        names = saved_names(snapshot)
        own = {**{name: self.state.get(name) for name in names}, _RNG: None, _PROGRESS: None}
        live = {**own, **self._objects, **self._attributes.entries()}
        return check(snapshot, live, entire=True, loose=names, verify=verify)

    def named_state(self) -> dict[str, object]:
        """Return all that another process needs to go on from here, by name."""
        own = {
            _RNG: process_rng.capture(),
            _PROGRESS: self._progress.state(),
            identity.NAME: self._training.text(),
        }
        return {**self._objects, **self.state.named(), **self._attributes.state(), **own}

    @property
    def values(self) -> State:
        """The attribute `state` by its former name."""
        return self.state

    def restartable(self, *, explicit: bool) -> bool:
        """Return True if another process could go on from here. If attributes forbid it, print why.

        ``explicit`` is True if the script itself asked to stop.
        """
        if not self._progress.restartable(explicit=explicit):
            self._attributes.overlook()
            return False
        return trainings.can_be_saved(self._runtime, self._attributes)

    @property
    def obstacle(self) -> str:
        """The reason why no other process could go on from the newest boundary that was examined."""
        return self._attributes.obstacle

    @property
    def restartable_later(self) -> bool:
        """True if another process could go on from a later boundary, as far as is known."""
        return self._progress.restartable_later


def attach(job: str | None = None, /, **named: object) -> Job:
    """Attach the state of this training script under names, and return its `Job`.

    Parameters
    ----------
    job
        The job's name, unless ``gpuslice run --job`` gives one. A named job's snapshots outlive a crash,
        and the process started next under that name goes on from the newest one.
    **named
        Modules, optimizers, schedulers, scalers, loaders, and whatever else has ``state_dict`` and
        ``load_state_dict``; tensors; generators of torch, NumPy and ``random``; numbers, texts, lists, dicts.

    Raises
    ------
    UsageError
        Naming what cannot be saved.
    SnapshotError
        If the named job's newest snapshot is damaged or does not fit the objects.
    """
    for name in named:
        if name.startswith(OWN_PREFIX):
            raise UsageError(f"the name {name!r} is gpuslice's own", "choose another one")
    described = describe(named)
    process = runtime()
    trainings.replace(process)
    trainings.name_job(process, job)
    gpu = next((t.device for _, t in described.tensors if t.device.type == "cuda"), None)
    if gpu is not None and not process.suspension.in_use.known:
        process.suspension.in_use.move_in(DeviceName("cuda", gpu.index))
    attached = Job(process, named)
    if process.settings.job:
        differs = partial(trainings.begin_anew, process)
        trainings.go_on(process, attached._training, partial(attached._go_on_from, differs=differs))
    process.attached = attached
    process.attachments += 1
    return attached


def restore(path: str | os.PathLike[str], /, **named: object) -> dict[str, Any]:
    """Load objects and the process's random number generators from a snapshot, and return the objects.

    Parameters
    ----------
    path
        A snapshot file, such as ``Snapshot.path``.
    **named
        Objects under the names that they were attached by; all or some of them.

    Returns
    -------
    dict
        The objects by name. Plain values are only in this dict, as they were saved.

    Raises
    ------
    CorruptSnapshotError
        If the file is damaged; nothing has changed.
    RefusedSnapshotError
        If it does not fit the objects, naming the entry; nothing has changed.
    """
    with open_snapshot(Path(path)) as snapshot:
        live = {**named, ATTRIBUTES: KnownAttributes(named), _RNG: None}
        restoration = check(snapshot, live, verify=config.load().verify)
        process_rng.check(restoration.value(_RNG), restoration.gpus)
        loaded = restoration.apply()
        process_rng.restore(loaded.pop(_RNG), restoration.gpus)
        loaded.pop(ATTRIBUTES, None)
        return loaded


def _check_place(call: str) -> None:
    """Raise an error unless the caller is the main thread, outside of functions that torch.func transforms.

    Nothing could stop the main thread amid a torch operation. In a transform, tensors have no memory.
    """
    if is_transformed():
        message = f"{call}() was called in a function that torch.func transforms"
        raise SuspendRefusedError(message, "call it outside of grad, vmap and the like")
    if threading.current_thread() is not threading.main_thread():
        name = threading.current_thread().name
        raise UsageError(f"{call}() was called in thread {name!r}", "call it in the main thread")


def _lives_on(item: object) -> bool:
    """Return True if the script keeps using the object itself, so that it must be loaded in place."""
    return isinstance(item, torch.Tensor) or is_holder(item)
