"""Prepares the slot of the next suspend of a job that somebody may suspend, while it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from gpuslice.checkpoint.switch.switch import Switch
from gpuslice.errors import GpusliceError
from gpuslice.runtime.boundaries import BoundaryCounter


class SlotPreparation:
    """A callback of a job's boundaries, from the second optimizer step on, when its state is complete.

    The arena of its next suspend is made ready in the background.

    Parameters
    ----------
    boundaries
        The process's counter, which calls it.
    may_suspend
        Whether the job could be suspended right here.
    switch
        What it prepares, made when it is first needed.

    Attributes
    ----------
    warming
        The last arena made ready ahead.
    """

    def __init__(
        self,
        boundaries: BoundaryCounter,
        *,
        may_suspend: Callable[[], bool],
        switch: Callable[[], Switch],
    ) -> None:
        self.warming: threading.Thread | None = None
        self._boundaries = boundaries
        self._may_suspend = may_suspend
        self._switch = switch
        boundaries.call_at(1, self._at_boundary)

    def resumed(self) -> None:
        """The next suspend has a slot of its own: a restartable snapshot's stays as it is."""
        self.warming = self._switch().warm_up()

    def _at_boundary(self, boundary: int) -> None:
        counter = self._boundaries
        # Adam's state comes with the first step; where there is none, gradients with the first pass.
        complete = counter.steps >= 2 or (counter.amid_graphs and boundary > 1)
        if not complete or not self._may_suspend():
            counter.call_at_next(self._at_boundary)
        elif self.warming is None:
            with suppress(GpusliceError):  # whatever is in the way, the suspend will say so
                self.warming = self._switch().warm_up()
