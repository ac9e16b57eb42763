"""Begins, replaces and finishes the trainings of one process, one after the other, with their snapshots."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from gpuslice.checkpoint.attributes.job_attributes import JobAttributes
from gpuslice.checkpoint.format.reader import SnapshotFile
from gpuslice.checkpoint.ramdisk.obstacle_note import take_note, write_note
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.errors import GpusliceError
from gpuslice.launch.command import LAUNCH, begun_anew
from gpuslice.launch.job_names import expand
from gpuslice.runtime.common_snapshots import CommonSnapshots, agree, newest_common
from gpuslice.runtime.ending import ended_well, say, undisturbed, whole_or_ended
from gpuslice.runtime.runtime import Runtime
from gpuslice.runtime.shared_value import SharedValue
from gpuslice.training.identity import UNKNOWN, Claim, Training, origin
from gpuslice.types import job_id


def note_start(process: Runtime) -> None:
    """Leave a trace of a named job's process, and print if its former run has attached nothing.

    The trace stays until the process attaches something. Under a scheduler, nothing is done: all jobs have
    names there, and a name is no promise that a job goes on.
    """
    job, rank = process.launched_job, process.identity.rank
    if not job or process.settings.socket:
        return
    with suppress(GpusliceError, OSError):  # without room it matters only to whoever has something to save
        ramdisk = process.storage.ramdisk
        former_s = ramdisk.traces.leave(ramdisk.home(job, rank), _launch())
        if former_s is not None and not ramdisk.boundaries(job, rank):
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(former_s))
            tell(process, f"job {job} begins anew: its run of {when} attached nothing (see gpuslice.attach)")


def _note_end(process: Runtime, *, well: bool) -> None:
    """Remove the trace of a process that has attached nothing, if it ends ``well``; else renew the trace."""
    job, rank = process.launched_job, process.identity.rank
    if job and not process.settings.socket and not process.attachments:
        with suppress(GpusliceError, OSError):
            home = process.storage.ramdisk.home(job, rank)
            if well:
                process.storage.ramdisk.traces.remove(home)
            else:
                process.storage.ramdisk.traces.leave(home, _launch())


def go_on(process: Runtime, training: Training, load: Callable[[SnapshotFile], None]) -> None:
    """Have a named job go on from its newest snapshot that is of this training, if there is one.

    Parameters
    ----------
    training
        The training that is being attached.
    load
        Loads a given snapshot and goes on from it.
    """
    ramdisk = process.storage.ramdisk
    ramdisk.traces.remove(ramdisk.home(process.settings.job, process.identity.rank))
    snapshots = own_snapshots(process, training)
    agreed = agree(snapshots, process.identity.world_size)
    boundary = newest_common(agreed)
    chosen = None if boundary is None else snapshots.pop(boundary)
    _close(snapshots)
    if len(agreed) > 1:
        value = SharedValue(key=f"gpuslice/snapshots/{training.attach}")
        process.common_snapshots = CommonSnapshots(
            process.storage.store, process.identity.rank, agreed, process.boundaries.call_at_next, value
        )
    process.storage.store.forget_after(-1 if chosen is None else chosen.boundary)
    explain_beginning(process, anew=chosen is None)
    if chosen is not None:
        whence = origin(chosen)
        load(chosen)
        tell(process, f"job {process.settings.job} goes on from {whence}")


def explain_beginning(process: Runtime, *, anew: bool) -> None:
    """Say why a named job begins ``anew``, if a process before it has left a note, and remove the note."""
    note = take_note(process.storage.store.directory)
    if anew and note:
        job = process.settings.job
        say(f"job {job} begins anew, because it could not be saved for a restart: {note}")


def begin_anew(process: Runtime, why: str) -> None:
    """Forget a named job's snapshots and execute its script anew, because it cannot go on from any of them.

    Returns if this process cannot execute the script anew. The next process of the job begins anew then.
    """
    drop_snapshots(process)
    if process.command.can_be_repeated(process.identity):
        say(f"job {process.settings.job} begins anew: {why}")
        process.storage.close(keep=False)
        process.command.repeat()
    write_note(process.storage.store.directory, why)


def can_be_saved(process: Runtime, attributes: JobAttributes) -> bool:
    """Return True if all of a job's attributes can be saved. For a named job, print what cannot."""
    obstacles, job = attributes.look(), process.settings.job
    if job and (news := attributes.news()):
        write_note(process.storage.store.directory, news)
        say(f"job {job} could not be restarted from here: {news}")
    return not obstacles


def own_snapshots(process: Runtime, training: Training) -> dict[int, SnapshotFile]:
    """Open and return the snapshots that a training can go on from, by boundary.

    Snapshots of other trainings are set aside, and the training's own that were set aside are brought back.

    Raises
    ------
    RefusedSnapshotError
        If the user has to say whether the job's snapshots are its own; nothing has changed.
    SnapshotError
        If all existing snapshots are damaged.
    """
    job, rank, aside = process.settings.job, process.identity.rank, process.storage.ramdisk.aside
    # A scheduler starts a job again by itself, which then has to go on.
    if process.settings.fresh and training.attach == 1 and not process.settings.socket:
        process.storage.close(keep=False)
        removed = aside.forget(job, rank)
        tell(process, begun_anew(job, removed))
    snapshots = process.storage.store.restartable()
    newest = snapshots[max(snapshots)] if snapshots else None
    try:
        own = newest is not None and training.claim(Training.of(newest), process.settings) is Claim.OWN
    except BaseException:
        _close(snapshots)
        raise
    if own or (newest is None and not aside.has(job, rank, training.key)):
        return snapshots
    if newest is not None:
        former = Training.of(newest)
        tell(process, f"job {job} keeps the snapshot of {origin(newest)}: another training's, not this one's")
        _close(snapshots)
        process.storage.abandon()
        aside.put(job, rank, UNKNOWN if former is None else former.key)
    else:
        process.storage.close(keep=False)
    if aside.has(job, rank, training.key):
        aside.take(job, rank, training.key)
    return process.storage.store.restartable()


def replace(process: Runtime) -> None:
    """End the attached training, if there is one, because the script attaches another."""
    if process.attached is not None:
        number = process.attachments
        tell(process, f"attached again: training {number} of this process ends, and {number + 1} begins")
        end(process, "another gpuslice.attach has replaced its job")


def end(process: Runtime, cause: str) -> None:
    """End the attached training: resume its state, make its loops raise an error, remove its snapshots.

    Parameters
    ----------
    process
        A process with an attached training.
    cause
        The reason, which the error of its loops names.
    """
    attached = process.attached
    assert attached is not None
    if process.suspension.away:
        with undisturbed(), whole_or_ended(lambda: process.suspension.whole):
            process.suspension.resume()
    attached.end(cause)
    process.attached = None
    drop_snapshots(process)
    process.common_snapshots = None
    if process.storage.is_open:
        process.storage.store.finished = None


def finish(process: Runtime) -> None:
    """Remove the snapshots of the attached training, which has ended: no other one may begin from them.

    They stay if the script may have the path of one of them.
    """
    if not (process.storage.is_open and process.storage.store.handed_out):
        drop_snapshots(process)


def name_job(process: Runtime, given: str | None) -> None:
    """Give the job the launcher's name, or else the name ``given``. Without both, it has no name.

    Raises
    ------
    UsageError
        If the text is not a valid name.
    """
    name = expand(process.launched_job or given or "", process.arguments[1:])
    if name and name != process.settings.job:
        job_id(name)
    if name != process.settings.job:
        storage = process.storage
        storage.close(keep=storage.is_open and not process.settings.job and storage.store.handed_out)
        process.settings = msgspec.structs.replace(process.settings, job=name)
        process.report.job = name


def drop_snapshots(process: Runtime) -> None:
    """Forget the snapshots of a named job whose training has ended: no process may go on from them.

    A job without a name keeps the snapshot whose path its script may have.
    """
    process.checkpoints.settle(keep=False)
    if process.settings.job and process.storage.is_open:
        if process.common_snapshots is not None:
            process.common_snapshots.withdraw()
        process.storage.store.forget_after(-1)
        process.storage.store.handed_out = False


def close(process: Runtime) -> None:
    """Close the store in the RAM disk, because the process ends.

    The snapshots of a named job stay if its script did not end well, ended while suspended, or attached
    nothing. The newest snapshot of a job without a name stays if the script asked for it: its path may be in
    use.
    """
    well = ended_well()
    if process.storage.is_open:
        _close_store(process, process.storage.store, well=well)
    _note_end(process, well=well)


def _close_store(process: Runtime, store: JobStore, *, well: bool) -> None:
    store.finished = None  # the other ranks, too, come to their end
    process.checkpoints.settle(keep=not well)
    if not process.settings.job:
        store.close(keep=store.handed_out)
        return
    if not process.attachments:
        store.close(keep=True)  # of another script
        return
    keep = not well or (store.handed_out and process.suspension.away)
    if keep and process.identity.world_size > 1:
        # Another rank may have died before its newest snapshot: as after a kill, both of ours stay.
        store.abandon()
        return
    store.close(keep=keep)
    if not keep and _is_command(process):
        process.storage.ramdisk.aside.remove(process.settings.job, process.identity.rank)


def _is_command(process: Runtime) -> bool:
    """Return True if this process is all of its job's command, so that the job ends with it."""
    return not process.settings.socket and _launch() == str(os.getpid())


def _launch() -> str:
    """Return the PID of the first process of the job's command, as text."""
    return os.environ.get(LAUNCH, str(os.getpid()))


def tell(process: Runtime, line: str) -> None:
    """Print a line that is the same for all ranks of a job, in rank 0 only."""
    if process.identity.rank == 0:
        say(line)


def _close(snapshots: dict[int, SnapshotFile]) -> None:
    for snapshot in snapshots.values():
        snapshot.close()
