"""The slots of a job that somebody may suspend, while it trains: made ready, and there for others."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from gpuslice.checkpoint.named import lazy_optimizer_state
from gpuslice.checkpoint.ramdisk.arena_preparation import WarmUp
from gpuslice.errors import GpusliceError
from gpuslice.runtime.boundaries import NEVER

if TYPE_CHECKING:
    from gpuslice.runtime.runtime import Runtime


class Upkeep:
    """An errand of a job's boundaries, from the second optimizer step on, when its state is complete.

    The arena of its next suspend is made ready in the background. What its slots take is on offer to whoever
    needs room in the RAM disk and finds none, unless somebody reads it.

    Parameters
    ----------
    job
        Its runtime.

    Attributes
    ----------
    warming
        The last arena made ready ahead.
    """

    def __init__(self, job: Runtime) -> None:
        self.warming: WarmUp | None = None
        self._job = job
        job.boundaries.errand, job.boundaries.errand_at = self._at_boundary, 1

    def resumed(self) -> None:
        """The next suspend has a slot of its own: a restartable snapshot's stays as it is."""
        self.warming = self._job.switch.warm_up()
        self.store_used()

    def store_used(self) -> None:
        """What used it, or a snapshot in it, ends by itself: look at the next boundary."""
        if self._job.settings.spill_dir:
            self._job.boundaries.errand_at = self._job.boundary + 1

    def _at_boundary(self, boundary: int) -> None:
        job = self._job
        # Adam's moments come with the first step; where there are none, gradients with the first pass.
        if job.boundaries.steps < 2 and not (job.boundaries.amid_graphs and boundary > 1):
            job.boundaries.errand_at = boundary + 1
            return
        job.boundaries.errand_at = NEVER
        if job.suspended or not job.interruptible():
            return
        with suppress(GpusliceError):  # whatever is in the way, the suspend will say so
            if self.warming is None:
                self.warming = job.switch.warm_up()
            if job.checkpoints.under_way or lazy_optimizer_state.under_way():
                self.store_used()
            else:
                job.store.spare()
