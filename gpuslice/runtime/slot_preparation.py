"""Prepares the slots of a job that somebody may suspend, while it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from gpuslice.checkpoint.ramdisk.store import JobStore
from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import GpusliceError
from gpuslice.runtime.boundaries import BoundaryCounter
from gpuslice.runtime.checkpoints import Checkpoints


class SlotPreparation:
    """A callback of a job's boundaries, from the second optimizer step on, when its state is complete.

    The arena of its next suspend is made ready in the background. Other jobs may take the room of its slots
    when they find none in the RAM disk, unless somebody reads them.

    Parameters
    ----------
    boundaries
        The process's counter, which calls it.
    checkpoints
        Those of the job: while one is written, its slot is in use.
    may_suspend
        Whether the job could be suspended right here.
    switch, store
        What it prepares, made when they are first needed.
    spills
        Whether slots can be moved to a slower file system, so that others can have their room.

    Attributes
    ----------
    warming
        The last arena made ready ahead.
    """

    def __init__(
        self,
        boundaries: BoundaryCounter,
        checkpoints: Checkpoints,
        *,
        may_suspend: Callable[[], bool],
        switch: Callable[[], Switch],
        store: Callable[[], JobStore],
        spills: bool,
    ) -> None:
        self.warming: threading.Thread | None = None
        self._boundaries = boundaries
        self._checkpoints = checkpoints
        self._may_suspend = may_suspend
        self._switch = switch
        self._store = store
        self._spills = spills
        boundaries.call_at(1, self._at_boundary)

    def resumed(self) -> None:
        """The next suspend has a slot of its own: a restartable snapshot's stays as it is."""
        self.warming = self._switch().warm_up()
        self.store_used()

    def store_used(self) -> None:
        """What used it, or a snapshot in it, ends by itself: look at the next boundary."""
        if self._spills:
            self._boundaries.call_at_next(self._at_boundary)

    def _at_boundary(self, boundary: int) -> None:
        counter = self._boundaries
        # Adam's state comes with the first step; where there is none, gradients with the first pass.
        complete = counter.steps >= 2 or (counter.amid_graphs and boundary > 1)
        if not complete or not self._may_suspend():
            counter.call_at_next(self._at_boundary)
            return
        with suppress(GpusliceError):  # whatever is in the way, the suspend will say so
            if self.warming is None:
                self.warming = self._switch().warm_up()
            if self._checkpoints.under_way:
                self.store_used()
            else:
                self._store().spare()
