"""The snapshots of jobs that are kept while no scheduler runs (``down --keep``): on a disk, not in memory.

They are spilled like those of any dead job, to ``--spill-dir`` or else to the state directory. The jobs'
next processes read them there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpuslice.config import format_size, load, parse_size, variable
from gpuslice.daemon.scheduler_setup import Setup
from gpuslice.errors import EnvironmentUnusableError, RamDiskFullError
from gpuslice.sched_core.nodes.local_node import SOCKET

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
        self._directory = directory
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
