"""The snapshots of jobs that are kept while no scheduler runs (``down --keep``): on a disk, not in memory.

They are spilled like those of any dead job, to ``--spill-dir`` or else to the state directory. The jobs'
next processes read them there. If the next scheduler has another directory for them, they go there first.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_128_hexdigest

from gpuslice.config import format_size, load, parse_size, variable
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.errors import EnvironmentUnusableError, RamDiskFullError, SnapshotError
from gpuslice.sched_core.jobs.kept import KeptJobs
from gpuslice.sched_core.nodes.local_node import SOCKET
from gpuslice.version import __version__

from . import kept_file
from .kept_file import Kept, KeptSnapshot

if TYPE_CHECKING:
    from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

#: The directory of kept snapshots in the state directory.
KEPT = "kept"
_REMEDY = "make room there, or start the scheduler with another --spill-dir; all jobs go on"


class KeptSnapshots:
    """The place of kept snapshots for the scheduler of ``directory``.

    Parameters
    ----------
    directory
        The scheduler's state directory.
    setup
        The scheduler's options.

    Attributes
    ----------
    environ
        The variables that every job gets. With them its processes find what is kept.
    """

    def __init__(self, directory: Path, setup: Setup) -> None:
        self._directory, self._setup = directory, setup
        #: The snapshots that ``store`` has moved.
        self._stored: tuple[KeptSnapshot, ...] = ()
        self._spill_dir, self._limit = setup.spill_dir, setup.spill_limit
        self._has_state = setup.has_state
        self.environ = setup.environ()
        if self.spill_dir:
            self.environ[variable("spill_dir")] = self.spill_dir

    @property
    def spill_dir(self) -> str:
        """The directory of spilled snapshots. Empty if there is no option for it, and none is kept."""
        own = self._directory / KEPT
        return self._spill_dir or (str(own) if own.is_dir() and any(own.glob("*.gsnp")) else "")

    def check(self) -> None:
        """Check that there is room for the snapshots of all parked jobs.

        Raises
        ------
        RamDiskFullError
            If there is not.
        EnvironmentUnusableError
            If the directory cannot be used.
        """
        if not self._has_state:
            return
        disk = self._open()
        assert disk.spilled is not None
        needed, free = disk.restartable_bytes(), disk.spilled.free_bytes
        if self._limit:
            free = min(free, parse_size(self._limit) - disk.spilled.used_bytes())
        if needed > free:
            raise RamDiskFullError(
                f"{disk.spilled.directory} has room for {format_size(max(0, free))}; "
                f"the snapshots of the jobs have {format_size(needed)}",
                _REMEDY,
            )

    def store(self, kept: dict[str, int]) -> None:
        """Move the snapshots of the scheduler's jobs to the disk, where each is verified.

        Parameters
        ----------
        kept
            The jobs that can be continued from snapshots, and of how many ranks of each.

        Raises
        ------
        RamDiskFullError
            If there is no room.
        EnvironmentUnusableError
            If a job has no snapshot there now, or has another one in memory still.
        """
        self._stored = ()
        if not self._has_state:
            return
        disk = self._open()
        assert disk.spilled is not None
        # If something goes wrong from here on, jobs are started again, and some snapshots are there.
        self.environ[variable("spill_dir")] = str(disk.spilled.directory)
        disk.spill(ours=True)
        for job, ranks in kept.items():
            for rank in range(ranks):
                if not disk.is_spilled(job, rank):
                    raise EnvironmentUnusableError(
                        f"the snapshot of rank {rank} of job {job} is not whole in {disk.spilled.directory}",
                        "see `gpuslice ramdisk ls`; all jobs go on",
                    )
        self._stored = tuple(_newest(disk, job, rank) for job in kept for rank in range(kept[job]))

    def note(self, jobs: KeptJobs) -> None:
        """Write the file of what is kept: ``jobs``, and the snapshots that ``store`` has moved.

        Raises
        ------
        EnvironmentUnusableError
            If it cannot be written.
        """
        setup, place = self._setup, self._spill_dir or KEPT
        kept = Kept(
            version=__version__,
            core_version=setup.core_version,
            unix_s=time.time(),
            policy=setup.policy,
            devices=tuple(map(str, setup.devices)),
            directory=place if self._stored else "",
            snapshots=self._stored,
            jobs=jobs,
        )
        try:
            kept_file.write(self._directory, kept)
        except OSError as error:
            raise EnvironmentUnusableError(
                f"cannot write {self._directory / kept_file.FILE}: {error.strerror}",
                "make room there; all jobs go on",
            ) from error

    def bring(self, kept: Kept) -> list[str]:
        """Have all snapshots of ``kept`` where the jobs of this scheduler look for them.

        Returns
        -------
        list of str
            For each that is missing, or is another one than was kept, a sentence that names it.

        Raises
        ------
        RamDiskFullError
            If there is no room for them.
        """
        missing: list[str] = []
        if not kept.snapshots:
            return missing
        disk = self._open()
        assert disk.spilled is not None
        for one in kept.snapshots:
            source = self._directory / kept.directory / one.file
            home, slot = disk.home(one.job, one.rank).name, slot_of(source)
            if _is(one, disk.spilled.path(home, slot)):
                continue
            if _is(one, source):
                disk.spilled.take(source, home, slot)
            else:
                what = f"the snapshot of rank {one.rank} of job {one.job}"
                missing.append(f"{what} is missing, or is not what was kept: {source}")
        self.environ[variable("spill_dir")] = str(disk.spilled.directory)
        return missing

    def clear(self, kept: Kept) -> None:
        """Remove the snapshots of ``kept`` from where they were, if they were brought elsewhere."""
        if kept.snapshots:
            disk = self._open()
            assert disk.spilled is not None
            for one in kept.snapshots:
                source = self._directory / kept.directory / one.file
                there = disk.spilled.path(disk.home(one.job, one.rank).name, slot_of(source))
                if there.exists() and source.exists() and not there.samefile(source):
                    source.unlink()

    def begin(self) -> None:
        """Remove the file of what is kept: jobs are about to be started."""
        kept_file.remove(self._directory)

    def _open(self) -> RamDisk:
        # late: it takes longer to import than all the rest
        from gpuslice.checkpoint.ramdisk.ramdisk import RamDisk

        return RamDisk.from_settings(
            load(
                spill_dir=self._spill_dir or str(self._directory / KEPT),
                spill_limit=self._limit or None,
                socket=f"ipc://{self._directory / SOCKET}",
            )
        )


def slot_of(snapshot: Path) -> int:
    """Return the slot of the spilled ``snapshot``, by its name."""
    from gpuslice.checkpoint.ramdisk.slots import SLOTS  # late, as above

    return next(number for number, name in enumerate(SLOTS) if snapshot.name.endswith(f".{name}"))


def _newest(disk: RamDisk, job: str, rank: int) -> KeptSnapshot:
    """Return the newest restartable snapshot of a job's rank in the spill directory of ``disk``."""
    assert disk.spilled is not None
    store = disk.home(job, rank).name
    found = [record for record in disk.spilled.records(store) if record.restartable]
    record = max(found, key=lambda one: one.generation)
    path = disk.spilled.path(store, record.slot)
    return KeptSnapshot(job, rank, path.name, path.stat().st_size, xxh3_128_hexdigest(record.encode()))


def _is(kept: KeptSnapshot, path: Path) -> bool:
    """Return True if ``path`` is the snapshot that was ``kept``, by its size and its commit record."""
    from gpuslice.checkpoint.format.reader import record_of  # late, as above

    try:
        same_size = path.stat().st_size == kept.bytes
        return same_size and xxh3_128_hexdigest(record_of(path).encode()) == kept.record
    except (OSError, SnapshotError):
        return False
