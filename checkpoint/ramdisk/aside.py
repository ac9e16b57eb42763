"""Stores of a job's other trainings, kept beside the job's own store until their turn comes.

A job's command may train more than once: one process after the other, or one ``attach`` after the other in
one process. The job's own store, ``<job>.r0``, has the snapshots of the current training. A command that is
started again begins with its first training, while the store may have snapshots of a later one. That store is
then renamed to ``<job>+<16 hex digits>.r0``, by the training's key. It gets its name back when that training
is attached.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gpuslice.checkpoint.locks import FileLock
from gpuslice.errors import UsageError

from .budget import Budget
from .listing import StoreInfo, is_alive, store_info
from .slots import OWNER, settle
from .spill import SpillDirectory


class Aside:
    """The stores of a job's other trainings, kept under other names (*set aside*); made by ``RamDisk``.

    Parameters
    ----------
    budget, spilled
        The RAM disk's.
    home
        Gives the directory of a job's rank.
    stores
        Gives the directories of all stores.
    """

    def __init__(
        self,
        budget: Budget,
        spilled: SpillDirectory | None,
        home: Callable[[str, int], Path],
        stores: Callable[[], list[Path]],
    ) -> None:
        self._budget = budget
        self._spilled = spilled
        self._home = home
        self._stores = stores

    def has(self, job: str, rank: int, training: str) -> bool:
        """Return True if a store of that training is set aside."""
        return self._path(job, rank, training) in self._stores()

    def put(self, job: str, rank: int, training: str) -> None:
        """Set the job's store aside for that training. No process may hold it.

        Raises
        ------
        UsageError
            If a living process has it.
        """
        self._rename(self._home(job, rank), self._path(job, rank, training))

    def take(self, job: str, rank: int, training: str) -> None:
        """Give a store that was set aside the job's own name. No process may hold it. Raises like `put`."""
        self._rename(self._path(job, rank, training), self._home(job, rank))

    def remove(self, job: str, rank: int) -> None:
        """Remove the stores that were set aside for other trainings of a job's rank."""
        home = self._home(job, rank)
        with self._budget.lock():
            for store in self._of(job):
                if store != home and _rank(store) == _rank(home):
                    self._clear(store)

    def forget(self, job: str, rank: int | None = None) -> list[StoreInfo]:
        """Remove all stores of a job, or of one rank of it, and return them as they were.

        Raises
        ------
        UsageError
            If a living process has one. Nothing was removed.
        """
        with self._budget.lock():
            stores = [one for one in self._of(job) if rank is None or _rank(one) == str(rank)]
            found = [store_info(store, self._spilled) for store in stores]
            for info in found:
                if info.alive:
                    raise _running(job, f"process {info.pid}")
            for store in stores:
                self._clear(store)
        return found

    def _path(self, job: str, rank: int, training: str) -> Path:
        home = self._home(job, rank)
        return home.with_name(f"{_stem(home)}+{training}.r{rank}")

    def _of(self, job: str) -> list[Path]:
        """Return the stores of all ranks and trainings of a job."""
        own = _stem(self._home(job, 0))
        return [store for store in self._stores() if _stem(store).partition("+")[0] == own]

    def _rename(self, store: Path, name: Path) -> None:
        with self._budget.lock():
            for one in (store, name):
                if one.exists() and is_alive(one):
                    raise _running(one.name.partition(".r")[0], "another process")
            self._clear(name)
            for entry in [] if self._spilled is None else self._spilled.entries(store.name):
                os.replace(entry.path, self._spilled_path(name, entry.slot))
            if store.exists():
                store.rename(name)

    def _spilled_path(self, store: Path, slot: int) -> Path:
        assert self._spilled is not None
        return self._spilled.path(store.name, slot)

    def _clear(self, store: Path) -> None:
        """Remove a dead store, here and in the spill directory. The caller holds the RAM disk's lock."""
        if store.exists():
            with FileLock.wait(store / OWNER):
                settle(store)
        for entry in [] if self._spilled is None else self._spilled.entries(store.name):
            entry.path.unlink(missing_ok=True)


def _stem(store: Path) -> str:
    return store.name.rpartition(".r")[0]


def _rank(store: Path) -> str:
    return store.name.rpartition(".r")[2]


def _running(job: str, process: str) -> UsageError:
    return UsageError(
        f"job {job} is running already, in {process}", "wait for it or stop it, or give this one another name"
    )
