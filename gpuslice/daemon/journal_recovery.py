"""The journal that a scheduler starts with: the last one's, a new one, or the whole part of a damaged one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from gpuslice.daemon.kept import kept_file, taking_over
from gpuslice.daemon.kept.snapshots import KeptSnapshots
from gpuslice.daemon.scheduler_setup import Setup, read_setup
from gpuslice.daemon.settings.present import IN_SETUP, fields_of
from gpuslice.errors import ConfigError, GpusliceError
from gpuslice.sched_core.journal.audit import audit
from gpuslice.sched_core.journal.head import path_of
from gpuslice.sched_core.journal.journal import FILE, Journal, JournalDamagedError
from gpuslice.sched_core.journal.repair import salvage
from gpuslice.sched_core.journal.replay import Replay
from gpuslice.sched_core.lifecycle.events import Event, SettingsChanged, TakenOver, submitted
from gpuslice.sched_core.nodes import exit_record
from gpuslice.sched_core.nodes.endpoint import next_past

#: What SQLite keeps beside its file.
_BESIDE = ("-wal", "-shm")
_MISSING = "bring the file back; `gpuslice up --accept-loss` starts the job from the beginning"


def former_changes(directory: Path) -> list[SettingsChanged]:
    """Return the changes of settings in the journal of ``directory``; none if it cannot be read."""
    try:
        with Journal(directory / FILE, read_only=True) as journal:
            return changes_in(journal)
    except GpusliceError:
        return []


def changes_in(journal: Journal) -> list[SettingsChanged]:
    """Return the changes of settings in ``journal``."""
    return [event for event, _ in journal.replay() if isinstance(event, SettingsChanged)]


def _as_begun(former: Setup, setup: Setup, changes: Sequence[SettingsChanged]) -> Setup:
    """Return ``setup``, but with the fields that ``changes`` changed as they were at first in ``former``.

    What was changed while the scheduler ran holds until it is changed again. So it makes no difference.
    """
    changed = {name for event in changes for name in fields_of(event) if name in IN_SETUP}
    return replace(setup, **{name: getattr(former, name) for name in changed})


def open_journal(
    directory: Path,
    setup: Setup,
    *,
    accept_loss: bool,
    warn: Callable[[str], None],
    kept: KeptSnapshots | None = None,
) -> Journal:
    """Open the journal of the last scheduler if it was set up alike, else a new one.

    A new one begins with the jobs that the last scheduler has kept, if it has (``down --keep``).

    Parameters
    ----------
    accept_loss
        Go on with what is whole of a damaged journal, and without snapshots that are missing.
    warn
        Called with what is missing then.
    kept
        The place of kept snapshots.

    Raises
    ------
    ConfigError
        If jobs of a scheduler that was set up differently have not ended, and are not kept.
    UsageError
        If a kept job could not run.
    JournalDamagedError
        If the journal is damaged; nothing was changed.
    KeptFileError
        If what is kept is needed and damaged; nothing was changed.
    """
    taking_over.finish(directory)
    if (directory / kept_file.FILE).exists():
        place = KeptSnapshots(directory, setup) if kept is None else kept
        _use_kept(directory, setup, place, accept_loss=accept_loss, warn=warn)
    journal = _open(directory, accept_loss=accept_loss, warn=warn)
    try:
        former = _former(journal)
        if former is not None and former != setup:
            _refuse_unfinished(directory, journal, former, setup)
            journal.close()
            _set_aside(directory)
            journal = Journal(directory / FILE)
        journal.introduce(msgspec.json.encode(setup))
    except BaseException:
        journal.close()
        raise
    return journal


def _use_kept(
    directory: Path,
    setup: Setup,
    place: KeptSnapshots,
    *,
    accept_loss: bool,
    warn: Callable[[str], None],
) -> None:
    """Have all in its place that is needed to go on with the kept jobs.

    If the journal is of a scheduler that was set up alike, it stays. Otherwise a new one takes its place.
    """
    former, settings, damage = _look(directory)
    try:
        found = kept_file.read(directory)
    except kept_file.KeptFileError as error:
        if former != setup:
            raise
        warn(f"{error.message}; the journal has all jobs")
        return
    if found is None:
        return
    kept, checksum = found
    if damage is not None and not accept_loss:
        all_there = f"; {kept_file.FILE} has all {len(kept.jobs.jobs)} kept jobs, so none of them is lost"
        raise JournalDamagedError(damage.path, damage.found, all_there) from damage
    events: list[Event] = [*settings, TakenOver(kept.jobs, time.time(), checksum)]
    now = max([time.monotonic(), *(one.kept_s for one in kept.jobs.jobs)])
    if former != setup:
        taking_over.check(events, setup.make_core, now)
    if (missing := place.bring(kept)) and not accept_loss:
        raise kept_file.KeptFileError(missing[0], _MISSING)
    for text in missing:
        warn(text)
    if former != setup:
        taking_over.replace_journal(directory, events, msgspec.json.encode(setup), now)
        of_whom = f"gpuslice {kept.version} with --devices {','.join(kept.devices)} --policy {kept.policy}"
        warn(f"{len(kept.jobs.jobs)} jobs that were kept by {of_whom} are taken over into a new journal")
    place.clear(kept)


def _look(directory: Path) -> tuple[Setup | None, list[SettingsChanged], JournalDamagedError | None]:
    """Return the options that the journal names, if any, what changed them, and what is wrong with it."""
    try:
        with Journal(directory / FILE) as journal:
            return _former(journal), changes_in(journal), None
    except JournalDamagedError as error:
        return None, [], error


def continued(directory: Path, setup: Setup) -> Setup:
    """Return ``setup``, but what the last scheduler's journal begins with if this one is to go on with it.

    That has another device memory if jobs have not ended.

    What kernel and driver say of it changes with their versions, and jobs were accepted by what they said.
    """
    try:
        with Journal(directory / FILE, read_only=True) as journal:
            former = _former(journal)
            if former is None:
                return setup
            changes = changes_in(journal)
            differences = _differences(former, _as_begun(former, setup, changes))
            if differences == ["device_memory_bytes"]:
                return former if changes or _unfinished(journal, former) else setup
            return setup if differences else former
    except GpusliceError:
        return setup  # there is no journal, or `open_journal` will say what is wrong


def _former(journal: Journal) -> Setup | None:
    written = journal.about()
    return None if written is None else read_setup(written)


def _differences(former: Setup, setup: Setup) -> list[str]:
    """Return the names of the settings that differ."""
    return [one.name for one in fields(Setup) if getattr(former, one.name) != getattr(setup, one.name)]


def _open(directory: Path, *, accept_loss: bool, warn: Callable[[str], None]) -> Journal:
    path = directory / FILE
    try:
        return Journal(path)
    except JournalDamagedError as error:
        named = JournalDamagedError(path, error.found, _describe_unknown_jobs(directory))
        if not accept_loss:
            raise named from error
    past = next_past(directory)
    _salvage(directory, past)
    warn(f"{named.message}; what was there is in {past}")
    return Journal(path)


def _describe_unknown_jobs(directory: Path) -> str:
    """Return a sentence on jobs that have logs and are not in the whole part of the journal."""
    known: set[str] = set()
    fresh = directory / "salvaged.sqlite"
    _build(directory, fresh)
    try:
        with Journal(fresh, read_only=True) as journal:
            known = {spec.id for event, _ in journal.replay() for spec, _ in submitted(event)}
    finally:
        _remove(fresh)
    logs = sorted((directory / "logs").glob("*.exit"))
    lost = [log for log in logs if exit_record.job_of(log) not in known]
    names = sorted({exit_record.job_of(log) for log in lost})
    running = [found for log in lost if (found := exit_record.read(log)) is not None and found.alive]
    if not names:
        return ""
    alive = f" (still running: processes {', '.join(str(one.pid) for one in running)})" if running else ""
    return f"; there are logs of jobs that it does not know: {', '.join(names)}{alive}"


def _build(directory: Path, fresh: Path) -> None:
    """Make a journal at ``fresh`` from the events that can be read."""
    _remove(fresh)
    salvage(directory / FILE, audit(directory / FILE), fresh)


def _salvage(directory: Path, past: Path) -> None:
    """Replace a damaged journal by its whole part. Keep all that was there in ``past``."""
    fresh = directory / "salvaged.sqlite"
    _build(directory, fresh)
    past.mkdir()
    damaged = directory / FILE
    sides = [damaged.with_name(FILE + suffix) for suffix in _BESIDE]
    for path in (damaged, *sides, path_of(damaged)):
        if path.exists():
            shutil.copy2(path, past / path.name)
    for side in sides:  # SQLite would take them for the new file's
        side.unlink(missing_ok=True)
    os.replace(fresh, damaged)
    os.replace(path_of(fresh), path_of(damaged))


def _remove(path: Path) -> None:
    for name in (path, path_of(path), *(path.with_name(path.name + suffix) for suffix in _BESIDE)):
        name.unlink(missing_ok=True)


def has_unfinished_jobs(directory: Path) -> bool:
    """Return True if jobs of the last scheduler have not ended, as far as the journal can be read."""
    try:
        with Journal(directory / FILE, read_only=True) as journal:
            former = _former(journal)
            return former is not None and bool(_unfinished(journal, former))
    except GpusliceError:
        return False  # there is none, or `open_journal` will say what is wrong


def _unfinished(journal: Journal, setup: Setup) -> list[str]:
    core = setup.make_core()
    for _ in Replay(journal, core, setup.make_core).advance():
        pass
    return [job.id for job in core.jobs.values() if not (job.state.ended and job.processes_gone)]


def _refuse_unfinished(directory: Path, journal: Journal, former: Setup, setup: Setup) -> None:
    unfinished = _unfinished(journal, former)
    if not unfinished:
        return
    names = ", ".join(unfinished)
    if former.core_version != setup.core_version:
        raise ConfigError(
            f"jobs of the last scheduler in {directory} have not ended ({names}), and another version of "
            f"gpuslice wrote its journal (core {former.core_version}; this is core {setup.core_version})",
            "with the version that wrote it, drain it or keep its jobs (`gpuslice down --keep`); or choose "
            "another --state-dir",
        )
    raise ConfigError(
        f"jobs of the last scheduler in {directory} have not ended ({names}); it had "
        f"--devices {','.join(map(str, former.devices))} --policy {former.policy}, and what differs is: "
        f"{', '.join(_differences(former, setup))}",
        "start it with the same options, and keep its jobs (`gpuslice down --keep`) to start it with others; "
        "or choose another --state-dir",
    )


def _set_aside(directory: Path) -> None:
    """Rename the files of the last scheduler, so that they are kept."""
    past = next_past(directory)
    past.mkdir()
    for name in (FILE, path_of(directory / FILE).name, "logs"):
        (directory / name).rename(past / name)
    (directory / "logs").mkdir()
