"""The RAM disk: one directory per user on tmpfs, with a limit, in which jobs keep their snapshots."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path

import psutil

from gpuslice.checkpoint.files import store_directory
from gpuslice.checkpoint.format.layout import PAGE_BYTES
from gpuslice.checkpoint.locks import FileLock
from gpuslice.config import Settings, parse_size
from gpuslice.errors import GpusliceError, SnapshotError, UsageError
from gpuslice.types import job_id

from .aside import Aside
from .budget import NOBODY, Budget, Own, Tenant
from .listing import STORE, UNNAMED, StoreInfo, TenantInfo, restartable_files, store_info, tenants
from .room_requests import SOCKET, request_room
from .slots import (
    OWNER,
    SLOTS,
    Owner,
    published,
    read_owner,
    restartable,
    settle,
    write_owner,
)
from .spill import SpillDirectory
from .start_traces import StartTraces
from .store import JobStore

#: How long a job waits while another process moves what its dead process left, and how often it checks.
_PATIENCE_S = 300.0
_LOOK_AGAIN_S = 0.05


class RamDisk:
    """A directory of mode 0700 with a limit on its bytes, shared by all processes of a user.

    Parameters
    ----------
    directory
        Where; ``/dev/shm/gpuslice-<uid>`` by default. Made when missing.
    limit_bytes
        Most bytes that all stores together may take; half of the file system by default.
    spill_directory
        Where the snapshots of dead named jobs and of parked ones go when there is no room.
    spill_limit_bytes
        Most bytes that all snapshots may take there; ``None`` for what its file system has.
    tenant
        The tenant of the stores that are opened through this object.
    scheduler
        The directory of the scheduler that gives the jobs their names; empty where people do.

    Raises
    ------
    EnvironmentUnusableError
        If a directory is a link, another user's, open to others, or cannot be made.
    """

    def __init__(
        self,
        directory: Path | None = None,
        limit_bytes: int | None = None,
        *,
        spill_directory: Path | None = None,
        spill_limit_bytes: int | None = None,
        tenant: Tenant = NOBODY,
        scheduler: str = "",
    ) -> None:
        self.directory = directory or Settings().ramdisk_directory
        store_directory(self.directory)
        self._budget = Budget(self.directory, limit_bytes, tenant)
        self._scheduler = scheduler
        self.spilled = None if spill_directory is None else SpillDirectory(spill_directory, spill_limit_bytes)
        self._budget.relief = self._relieve
        self.traces = StartTraces(self._budget)
        self.aside = Aside(self._budget, self.spilled, self.home, self._stores)

    @classmethod
    def from_settings(cls, settings: Settings) -> RamDisk:
        """Return the RAM disk of a job with these settings, with its tenant's limit."""
        limit_bytes = parse_size(settings.tenant_ramdisk) if settings.tenant_ramdisk else None
        return cls(
            settings.ramdisk_directory,
            parse_size(settings.ramdisk_limit) if settings.ramdisk_limit else None,
            spill_directory=Path(settings.spill_dir) if settings.spill_dir else None,
            spill_limit_bytes=parse_size(settings.spill_limit) if settings.spill_limit else None,
            tenant=Tenant(settings.tenant, limit_bytes),
            scheduler=_scheduler(settings.socket),
        )

    @property
    def limit_bytes(self) -> int:
        """Limit that applies to stores opened through this object."""
        return self._budget.limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that all stores take up."""
        return self._budget.used_bytes()

    @property
    def free_bytes(self) -> int:
        """Bytes that file system and memory can still give, apart from any limit."""
        return self._budget.free_bytes()

    def open_store(self, job: str | None, rank: int = 0, *, ranks: Collection[int] = ()) -> JobStore:
        """Return this process's store for a rank of ``job``, with all that a dead process of the job left.

        Parameters
        ----------
        job
            The job's name; ``None`` for a job whose snapshots end with its process.
        rank
            Its rank.
        ranks
            The job's ranks on this node, whose snapshots may have in common what is equal.

        Raises
        ------
        UsageError
            If a living process has this job and rank, or the name is no name.
        SnapshotError
            If all that it left is in the spill directory, and damaged.
        """
        if rank < 0:
            raise UsageError(f"rank {rank} is negative", "count ranks from 0")
        if job is None:
            directory = self.directory / f"{UNNAMED}{secrets.token_hex(8)}.r{rank}"
        else:
            directory = self.home(job, rank)
        ends_s = time.monotonic() + _PATIENCE_S
        while (lock := self._claim(directory)) is None:
            owner = read_owner(directory)
            if owner is not None and not owner.lives and time.monotonic() < ends_s:
                time.sleep(_LOOK_AGAIN_S)
                continue
            process = f"process {owner.pid}" if owner else "another process"
            raise UsageError(
                f"job {job} rank {rank} is running already, in {process}",
                "wait for it or stop it, or give this one another name",
            )
        return self._take_over(directory, lock, job, rank, ranks)

    def home(self, job: str, rank: int) -> Path:
        """Return the path of the store of a named job's rank. Jobs of two schedulers have separate stores."""
        return self.directory / f"{job_id(job)}{self._suffix()}.r{rank}"

    def _suffix(self) -> str:
        """Return the end of the names of this scheduler's stores, before the rank. Empty without one."""
        scheduler = os.fsencode(self._scheduler)
        return f"@{blake2b(scheduler, digest_size=4).hexdigest()}" if scheduler else ""

    def _claim(self, directory: Path) -> FileLock | None:
        """Create the store if it is missing, and return its lock; None if a living process holds it."""
        with self._budget.lock():
            store_directory(directory)
            return FileLock.attempt(directory / OWNER)

    def _take_over(
        self, directory: Path, lock: FileLock, job: str | None, rank: int, ranks: Collection[int]
    ) -> JobStore:
        """Return the opened store of a directory that was claimed."""
        try:
            tenant = self._budget.tenant
            with self._budget.taking(PAGE_BYTES):
                me = psutil.Process()
                limit_bytes, at = tenant.limit_bytes, self._scheduler
                owner = Owner(job, rank, me.pid, me.create_time(), tenant.name, limit_bytes, at)
                write_owner(lock.descriptor, owner)
            peers = [] if job is None else [self.home(job, other) for other in ranks if other != rank]
            return JobStore(directory, lock, self._budget, job, rank, self.spilled, peers)
        except BaseException:
            lock.release()
            raise

    def listing(self) -> list[StoreInfo]:
        """Return all stores, of living and dead processes, by name; also those that are only spilled."""
        with self._budget.lock():
            return [store_info(directory, self.spilled) for directory in self._stores()]

    def tenants(self) -> list[TenantInfo]:
        """Return the use of each tenant that has a store here, by name."""
        with self._budget.lock():
            return tenants(self._stores())

    def spill(self, *, ours: bool = False) -> list[StoreInfo]:
        """Move the restartable snapshots of dead named jobs to the spill directory. Damaged ones stay.

        Parameters
        ----------
        ours
            Only those of this RAM disk's scheduler.

        Returns
        -------
        list of StoreInfo
            The stores that were moved, as they were.

        Raises
        ------
        UsageError
            If there is no spill directory.
        RamDiskFullError
            If it has no room; the snapshots that were not moved stay.
        """
        if self.spilled is None:
            raise UsageError("there is no spill directory", "name one with --spill-dir")
        moved = map(self._spill_dead, self._ours() if ours else self._stores())
        return [info for info in moved if info is not None]

    def _spill_dead(self, directory: Path) -> StoreInfo | None:
        """Move a dead named job's restartable snapshots, and return its store; None if none was moved."""
        spilled = self.spilled
        with self._budget.lock():
            if spilled is None or not directory.exists():
                return None  # everything was moved before
            info = store_info(directory, spilled)
            lock = None if info.alive or info.job is None else FileLock.attempt(directory / OWNER)
        if lock is None:
            return None
        with lock:
            records, damaged = list(restartable(directory)), []
            for record in records:
                try:
                    spilled.take(directory / SLOTS[record.slot], directory.name, record.slot)
                except SnapshotError:
                    damaged.append(record)  # it stays: the process that needs it reports the damage
            moved = len(damaged) < len(records)
            if moved:
                with self._budget.lock():
                    settle(directory, damaged)
        return info if moved else None

    def _relieve(self, helps: Callable[[Path], bool], own: Own) -> Iterator[None]:
        """Make room step by step, and yield after each step. At the end raise the first failure.

        A failure to make room in one store does not stop the attempts in others.
        """
        failure: GpusliceError | None = None
        for give in self._givers(helps, own):
            try:
                while give():
                    yield
            except GpusliceError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _givers(self, helps: Callable[[Path], bool], own: Own) -> Iterator[Callable[[], object]]:
        """Yield functions that make room and return True if they did: from dead stores, ``own``, parked jobs.

        The job that was parked last comes first: where jobs take turns, it needs its slots last.
        """
        for give in (self._discard, self._spill_dead):
            for directory in filter(helps, self._stores()):
                yield partial(give, directory)
        yield own
        for directory in filter(helps, self._parked()):
            yield partial(request_room, directory)

    def _parked(self) -> list[Path]:
        """Return the stores whose processes accept requests for room, the latest first."""
        stores = [store for store in self._stores() if (store / SOCKET).exists()]
        return sorted(stores, key=lambda store: _since_ns(store / SOCKET), reverse=True)

    def discard(self, scheduler: str) -> None:
        """Remove what a scheduler's dead jobs left, if no process can continue from it."""
        for directory in self._stores():
            owner = read_owner(directory)
            if owner is not None and owner.scheduler == scheduler:
                self._discard(directory)

    def _discard(self, directory: Path) -> bool:
        """Remove a dead named job's files if no process can continue from them. Return True if removed."""
        with self._budget.lock():
            if not directory.exists():
                return False  # everything was spilled
            info = store_info(directory, self.spilled)
            of_use = info.alive or info.job is None or any(one.restartable for one in published(directory))
            if not of_use:
                self._clear(directory, wanted=True)
            return not of_use

    def forget(self, jobs: Collection[str]) -> None:
        """Remove all that dead processes of ``jobs`` left, which are of this RAM disk's scheduler."""
        own = STORE.fullmatch(self.home("any", 0).name)
        assert own is not None
        for directory in self._stores():
            found = STORE.fullmatch(directory.name)
            if found is None or found["job"] not in jobs or found["scheduler"] != own["scheduler"]:
                continue
            with self._budget.lock():
                if not (directory.exists() and store_info(directory, self.spilled).alive):
                    self._clear(directory, wanted=False)

    def collect(self, *, everything: bool = False) -> list[StoreInfo]:
        """Remove what dead processes left, and return those stores. Stores of living ones are never touched.

        A named job's restartable snapshots stay, the older one, too: a rank may be ahead of other ranks of
        its gang, on any node.

        Parameters
        ----------
        everything
            Also remove the restartable snapshots that named jobs left to go on from, the spilled ones too.

        Returns
        -------
        list of StoreInfo
            The stores that were removed, as they were.
        """
        removed = []
        with self._budget.lock():
            for directory in self._stores():
                info = store_info(directory, self.spilled)
                if not info.alive and not self._clear(
                    directory, wanted=info.job is not None and not everything
                ):
                    removed.append(info)
        if self.spilled is not None:
            self.spilled.clean()
        return removed

    def _clear(self, directory: Path, *, wanted: bool) -> bool:
        """Remove the unneeded parts of a dead store. Return True if anything is left."""
        left = directory.exists() and settle(directory, [*restartable(directory)] if wanted else ())
        for entry in [] if self.spilled is None else self.spilled.entries(directory.name):
            if wanted and not entry.is_useless():
                left = True
            else:
                entry.path.unlink()
        return left

    def boundaries(self, job: str, rank: int = 0) -> set[int]:
        """Return the boundaries of a named job's restartable snapshots. Its process may be alive."""
        return set(restartable_files(self.home(job, rank), self.spilled))

    def restartable_bytes(self) -> int:
        """Return the bytes of the restartable snapshots of this RAM disk's scheduler that are not spilled."""
        found = ((store, record) for store in self._ours() if store.exists() for record in restartable(store))
        return sum((store / SLOTS[record.slot]).stat().st_size for store, record in found)

    def is_spilled(self, job: str, rank: int) -> bool:
        """Return True if all restartable snapshots of a named job's rank are spilled, and there is one."""
        home = self.home(job, rank)
        left = home.exists() and any(restartable(home))
        spilled = [] if self.spilled is None else self.spilled.records(home.name)
        return not left and any(record.restartable for record in spilled)

    def _ours(self) -> list[Path]:
        """Return the directories of the stores of this RAM disk's scheduler, as ``_stores``."""
        end = self._suffix()
        return [store for store in self._stores() if store.name.rpartition(".r")[0].endswith(end)]

    def _stores(self) -> list[Path]:
        """Return the directories of all stores, by name. Those of spilled stores need not exist."""
        with os.scandir(self.directory) as entries:
            found = {e.name for e in entries if e.is_dir(follow_symlinks=False) and STORE.fullmatch(e.name)}
        if self.spilled is not None:
            found |= {entry.store for entry in self.spilled.entries()}
        return [self.directory / name for name in sorted(found)]


def _scheduler(endpoint: str) -> str:
    """Return the directory of the scheduler that listens at a local endpoint; empty without one."""
    return os.path.realpath(os.path.dirname(endpoint.removeprefix("ipc://"))) if endpoint else ""


def _since_ns(socket: Path) -> int:
    """Return since when a process listens at a socket; 0 if it no longer does."""
    try:
        return socket.lstat().st_mtime_ns
    except FileNotFoundError:
        return 0  # it no longer listens
