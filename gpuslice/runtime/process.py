"""The facts about one process of a job: its rank, its command, its attached job, and its snapshot storage."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk
from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.config import Settings
from gpuslice.launch.command import LAUNCH, fingerprint, rank_path
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.common_snapshots import CommonSnapshots
from gpuslice.runtime.run_report import Report
from gpuslice.training.attached import Attached
from gpuslice.training.identity import Training, in_notebook


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks of an elastic job that train together: ``0`` to ``width - 1``, since lease epoch ``world``.

    A rank that was away meanwhile, or has just begun, sees another ``world`` than it was in.
    """

    world: int
    width: int


class OwnCommand:
    """This process's interpreter, arguments, environment and directory, before the script changes them."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._pid = os.getpid()
        try:
            self._directory = os.getcwd()
        except OSError:  # it was removed
            self._directory = ""

    def can_be_repeated(self, identity: RankIdentity) -> bool:
        """Return True if executing the command again does what it did at first.

        False for one of several ranks, as the others would wait for it, and for a notebook or a script on
        standard input, whose code is gone.
        """
        main = sys.modules["__main__"]
        text = getattr(main, "__file__", None) is not None or sys.argv[:1] == ["-c"]
        own = self._pid == os.getpid() and multiprocessing.parent_process() is None
        return text and own and identity.world_size == 1 and not hasattr(sys, "ps1") and not in_notebook()

    def repeat(self) -> NoReturn:
        """Replace this process by a new execution of its command. Does not return."""
        for child in multiprocessing.active_children():
            child.kill()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        if self._directory:
            os.chdir(self._directory)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self._environ)


class Process:
    """The facts that the parts of a `Runtime` share.

    Parameters
    ----------
    settings
        The settings that the launcher handed down.
    identity
        The rank of this process.
    boundaries
        The process's counter.

    Attributes
    ----------
    attached
        The job that ``gpuslice.attach`` made, if the script did.
    attachments
        How many trainings this process has attached.
    launched_job
        The name that the launcher gave the job; empty without one.
    arguments
        ``sys.argv`` when the process began.
    command
        The command that this process executes.
    report
        The run report, which collects the switches.
    membership
        The ranks of an elastic job that train, if a scheduler says so.
    for_restart
        True if another process is to go on from the snapshot of the suspend that was ordered.
    checkpointing
        True while a checkpoint is begun. A state that takes long to save is saved in these two cases only.
    common_snapshots
        What the ranks of a named gang know of each other's snapshots, if each goes on from its own.
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
        self.for_restart = self.checkpointing = False
        self.common_snapshots: CommonSnapshots | None = None
        launch = os.environ.get(LAUNCH, "")
        self.report = Report(self.report_path(), job=settings.job, rank=identity.rank, launch=launch)

    def report_path(self) -> Path | None:
        """Return the path of this rank's report; None if no report was asked for."""
        return rank_path(Path(self.settings.report), self.identity.rank) if self.settings.report else None

    def next_training(self) -> Training:
        """Return the training that the script's next ``attach`` begins."""
        # Without a launcher this process is the command: it may execute one script after the other.
        command = self.settings.command or fingerprint(sys.orig_argv)
        return Training.present(self.arguments, self.attachments + 1, command)

    def write_report(self) -> None:
        """Update the report file."""
        self.report.update(boundaries=self.boundaries.count, steps=self.boundaries.steps)


class Storage:
    """The store of one rank, opened on first use and again after it was closed.

    Parameters
    ----------
    process
        The rank's process. Its settings name the directory and the job.
    leaving
        Called before the open store is closed or abandoned.
    """

    def __init__(self, process: Process, leaving: Callable[[], None]) -> None:
        self._process = process
        self._leaving = leaving
        self._store: JobStore | None = None

    @cached_property
    def ramdisk(self) -> RamDisk:
        """The RAM disk. The first use checks the directory."""
        return RamDisk.from_settings(self._process.settings)

    @property
    def store(self) -> JobStore:
        """This rank's own directory in the RAM disk, opened if it is not yet."""
        if self._store is None:
            rank, job = self._process.identity, self._process.settings.job
            self._store = self.ramdisk.open_store(job or None, rank.rank, ranks=rank.local_ranks)
        return self._store

    @property
    def is_open(self) -> bool:
        """Return True if the store is open."""
        return self._store is not None

    def close(self, *, keep: bool) -> None:
        """Close the store, if it is open. Keep its snapshots if ``keep`` is True, else remove them."""
        self._leaving()
        store, self._store = self._store, None
        if store is not None:
            store.close(keep=keep)

    def abandon(self) -> None:
        """Release the store without changing its files."""
        self._leaving()
        store, self._store = self.store, None
        store.abandon()
