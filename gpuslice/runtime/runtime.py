"""The runtime of one process of a job: what it is, how it is suspended, and how it is saved."""

from __future__ import annotations

from gpuslice.config import Settings
from gpuslice.errors import UsageError
from gpuslice.launch.rank_identity import RankIdentity
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.checkpoints import Checkpoints
from gpuslice.runtime.process import Process
from gpuslice.runtime.saving import Saving
from gpuslice.runtime.suspension import Suspension


class Runtime(Process):
    """The runtime of one process of a job: its facts, and the parts that suspend and save it.

    Parameters
    ----------
    settings, identity, boundaries
        As of `Process`.

    Attributes
    ----------
    checkpoints
        The checkpoints that are taken while the training goes on.
    suspension
        Moves the state off the device, and back.
    storage
        The store that snapshots go to.
    saving
        Begins the checkpoints.

    Raises
    ------
    EnvironmentUnusableError
        If the route that the settings name cannot be taken here.
    """

    def __init__(self, settings: Settings, identity: RankIdentity, boundaries: BoundaryCounter) -> None:
        super().__init__(settings, identity, boundaries)
        self.checkpoints = Checkpoints(self.report)
        self.suspension = Suspension(self, self.checkpoints)
        self.storage = self.suspension.storage
        self.saving = Saving(self, self.suspension, self.checkpoints)

    def set_rank(self, identity: RankIdentity) -> None:
        """Change to the rank that the script has just become.

        Raises
        ------
        UsageError
            If the named job's snapshots of another rank are open already.
        """
        opened = self.storage.is_open
        if identity.rank != self.identity.rank and self.settings.job and opened:
            raise UsageError(
                f"rank {identity.rank} of job {self.settings.job} was suspended as rank {self.identity.rank}",
                "call torch.distributed.init_process_group before the training begins",
            )
        self.identity = identity
        self.report.set_rank(identity.rank, self.report_path())
        self.suspension.in_use.set_rank(identity)

    def summary(self) -> str:
        """Return the totals of the run and its route, in one line."""
        totals = self.report.summary(boundaries=self.boundaries.count, steps=self.boundaries.steps)
        return f"{totals}, route {self.suspension.route.value}"
